"""The order in which a cache runs a program within a budget, and the values that numbers in its events stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from recompute._simulator.replay import Placeholder, Replay, Rerun
from recompute._simulator.run import uncollected
from recompute._traces.program import Program, Step
from recompute.events import Added, Event, Performed
from recompute.policies import DEFAULT

_DEAREST = 20.0  # times the cost of the program


class Numbers:
    """Follows the events of a replay: which value of the program each number in them means."""

    def __init__(self, program: Program) -> None:
        self.values: dict[int, int] = {}
        """Number in the events -> value of the program."""
        self._program = program
        self._calls = iter([which for kind, which in program.steps if kind == "call"])
        self._sources = iter([which for kind, which in program.steps if kind == "source"])

    def hear(self, event: Event) -> int | None:
        """Take in an event; the call that runs for the first time, or the value of a source that has come."""
        if isinstance(event, Performed) and not event.again:
            call = next(self._calls)
            self.values.update(zip(event.results, self._program.calls[call].results, strict=False))
            return call
        if isinstance(event, Added):
            source = self.values[event.storage] = next(self._sources)
            return source
        return None


class _NotedRerun(Rerun):
    """The function of a replayed operation, which notes that it runs."""

    __slots__ = ("note",)

    note: Callable[[], None]

    def __call__(self, *payloads: Placeholder) -> Any:
        made = super().__call__(*payloads)
        self.note()
        return made


class _NotedReplay(Replay):
    """A replay that notes what runs, what is got and what is detached: in half the time that events would take."""

    def __init__(self, program: Program, budget: int) -> None:
        self.order: list[Step] = []
        budgets = dict.fromkeys([program.devices[storage] for storage in program.storages], budget)
        super().__init__(program, budgets, policy=DEFAULT, limit=_DEAREST)

    def _function(self, number: int) -> Rerun:
        function = _NotedRerun(self.program, self.program.calls[number], self.clock, self._aliased)
        function.note = partial(self.order.append, ("call", number))
        return function

    def _get(self, value: int) -> None:
        self._handle(value).get()
        self.order.append(("get", value))

    def _detach(self, value: int) -> None:
        self._handle(value).detach()
        self.order.append(("detach", value))

    do: ClassVar = {**Replay.do, "get": _get, "detach": _detach}


def order_of_runs(program: Program, budget: int) -> list[Step] | None:
    """The calls, repeated ones too, and what is got and detached, in order; None: the program does not fit.

    The default policy decides. Some ten microseconds for each run. None as well for calls without results, which the
    cache does not know.
    """
    if not all(call.results for call in program.calls):
        return None
    replay = _NotedReplay(program, budget)
    with uncollected():
        status = replay.run()
    return replay.order if status == "ok" else None
