"""The order in which a cache runs the operations of a program within a budget: the first runs and the repeated ones."""

from __future__ import annotations

from recompute._simulator.simulate import simulate
from recompute._traces.program import Program, Step
from recompute.events import Accessed, Added, Detached, Event, Performed

_MOST = 20.0  # times the cost of the program


def order_of_runs(program: Program, budget: int) -> list[Step] | None:
    """The calls, repeated ones too, and what is got and detached, in order; None: the program does not fit.

    The default policy decides. Some ten microseconds for each run. None as well for calls without results, which the
    cache does not know.
    """
    if not all(call.results for call in program.calls):
        return None
    order: list[Step] = []
    values: dict[int, int] = {}  # number in the events -> value of the program
    calls = iter([which for kind, which in program.steps if kind == "call"])
    sources = iter([which for kind, which in program.steps if kind == "source"])

    def listen(event: Event) -> None:
        if isinstance(event, Performed):
            if not event.again:
                call = next(calls)
                values.update(zip(event.results, program.calls[call].results, strict=True))
                order.append(("call", call))
            elif event.results:
                order.append(("call", program.makers[values[event.results[0]]]))
        elif isinstance(event, Added):
            values[event.storage] = next(sources)
        elif isinstance(event, Accessed):
            order.append(("get", values[event.value]))
        elif isinstance(event, Detached):
            order.append(("detach", values[event.value]))

    run = simulate(program, budget, limit=_MOST, machine="library", listener=listen)
    return order if run.status == "ok" else None
