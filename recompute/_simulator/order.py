"""The order in which a cache runs a program within a budget, and the values that numbers in its events stand for."""

from __future__ import annotations

from recompute._simulator.simulate import simulate
from recompute._traces.program import Program, Step
from recompute.events import Accessed, Added, Detached, Event, Performed

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


def order_of_runs(program: Program, budget: int) -> list[Step] | None:
    """The calls, repeated ones too, and what is got and detached, in order; None: the program does not fit.

    The default policy decides. Some ten microseconds for each run. None as well for calls without results, which the
    cache does not know.
    """
    if not all(call.results for call in program.calls):
        return None
    order: list[Step] = []
    numbers = Numbers(program)
    values = numbers.values

    def listen(event: Event) -> None:
        call = numbers.hear(event)
        if isinstance(event, Performed):
            if call is not None:
                order.append(("call", call))
            elif event.results:
                order.append(("call", program.makers[values[event.results[0]]]))
        elif isinstance(event, Accessed):
            order.append(("get", values[event.value]))
        elif isinstance(event, Detached):
            order.append(("detach", values[event.value]))

    peak = dict.fromkeys([program.devices[storage] for storage in program.storages], budget)  # its own takes a replay
    run = simulate(program, budget, limit=_DEAREST, machine="library", listener=listen, peak=peak)
    return order if run.status == "ok" else None
