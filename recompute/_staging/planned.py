"""`planned`, alias `stage`: record a function at its first call, plan it, and run the plan in that and later calls.

A call of the plan searches for nothing, counts nothing and takes no lock: it computes and frees in the planned order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

from recompute._budget import bytes_or_peak, format_bytes
from recompute._errors import StagingError
from recompute._plans.plan import plan
from recompute._plans.schedule import ProgramPlan
from recompute._recomputable import Recomputable
from recompute._staging.arguments import Layout
from recompute._staging.graph import Compute, Graph, RecordingCache, bind, fill
from recompute._traces.program import Program
from recompute.extend import Value, pack
from recompute.text import name_of

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class _How(TypedDict, total=False):
    of_peak: float | str | None
    method: str
    time_limit: float


@overload
def planned(
    function: Callable[..., Recomputable[R]], budget: int | str | None = None, **how: Unpack[_How]
) -> Staged[R]: ...
@overload
def planned(function: Callable[..., Any], budget: int | str | None = None, **how: Unpack[_How]) -> Staged[Any]: ...
@overload
def planned(
    function: None = None, budget: int | str | None = None, **how: Unpack[_How]
) -> Callable[[Callable[..., Any]], Staged[Any]]: ...
def planned(
    function: Callable[..., Any] | None = None,
    budget: int | str | None = None,
    *,
    of_peak: float | str | None = None,
    method: str = "own",
    time_limit: float = 60.0,
) -> Any:
    """A function that does what `function` does, within a budget, by a plan made in advance.

    The first call runs `function` once to record it, with its arguments as the example, and plans what was recorded.
    It makes its results with `ap` (or `lift`, `map`, ...) from its arguments and returns Recomputables, alone or in
    tuples, lists and dicts; the planned function returns plain values in the same tuples, lists and dicts.

    Of the arguments, arrays (values that an adapter serves) and Recomputables, also inside tuples, lists and dicts, are
    inputs: in later calls they must have the same shapes and types. What `array` has wrapped is wrapped in the
    function, too. Everything else is part of the graph: it must be equal in later calls.

    Parameters
    ----------
    budget, of_peak
        Bytes ("512MB") for inputs, constants, intermediate and final results together; or instead a share (0.4, "40%")
        of the peak of the example: of the bytes that it has in use at its worst moment without a budget, if each value
        is dropped after its last use. For bytes, the example runs within the budget, too.
    method, time_limit
        As for `recompute.planners.plan`: how to plan, and how many seconds that may take.

    The first call raises StagingError if the graph depends on a value (`get` or `detach` while it is recorded),
    PlanError if nothing fits, and what the function raises; the next call then is the first one again. Later calls
    raise StagingError if arguments or results are not as planned. Threads that call it first at the same time each
    record and plan. `@planned(budget="512MB")` is a decorator.
    """
    bytes_or_peak(budget, of_peak)
    if function is None:
        return partial(planned, budget=budget, of_peak=of_peak, method=method, time_limit=time_limit)
    if not callable(function):
        raise TypeError(
            f"planned takes a function first, not {function!r}; as a decorator: @planned(budget={function!r})"
        )
    return Staged(function, budget, of_peak, {"method": method, "time_limit": time_limit})


stage = planned
"""The same, by the name that this has where programs are compiled."""


class Staged(Generic[R_co]):
    """A planned function: call it like the function itself."""

    __name__: str

    def __init__(
        self, function: Callable[..., Any], budget: int | str | None, of_peak: float | str | None, how: dict[str, Any]
    ) -> None:
        self._function = function
        self._budget = budget
        self._of_peak = of_peak
        self._how = how
        self._line: _Line | None = None
        update_wrapper(self, function, updated=())

    @property
    def plan(self) -> ProgramPlan:
        """The schedule: its overhead, its peak, its steps. Raises StagingError before the first call."""
        return self._recorded().plan

    @property
    def program(self) -> Program:
        """The recorded program. Raises StagingError before the first call."""
        return self._recorded().program

    def _recorded(self) -> _Line:
        if self._line is None:
            raise StagingError(f"{name_of(self._function)} is recorded and planned at its first call; call it first")
        return self._line

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        line = self._line
        if line is None:
            line = self._line = self._record(args, kwargs)
        return line.run(args, kwargs)  # type: ignore[no-any-return]  # as the function had it

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method, if it stands in a class: of one object, which is equal in later calls, as all that is no input."""
        return self if instance is None else MethodType(self, instance)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Line:
        function, layout = self._function, Layout()
        inputs: list[Recomputable[Any]] = []
        results: list[Value] = []
        amount = bytes_or_peak(self._budget, self._of_peak)
        recorder = RecordingCache(amount if isinstance(amount, int) else None)
        with recorder:
            try:
                given = layout.take(args, "the positional arguments", inputs)
                named = layout.take(kwargs, "the keyword arguments", inputs)
            except RecursionError:
                raise ValueError(
                    "an argument is nested too deeply, or contains itself; pass it as a Recomputable"
                ) from None
            result = function(*given, **named)
            handles: list[Any] = []
            wanted = pack(result, handles, results)
            if any(handle.cache is not recorder for handle in handles):
                raise StagingError(
                    f"{name_of(function)} returned a Recomputable of another cache; make it in the function, without a "
                    "cache of its own, or pass it as an argument"
                )
            if not results:
                raise StagingError(f"{name_of(function)} returned no Recomputable, but a {type(result).__name__}")
            graph = Graph(name_of(function), recorder, [handle._node for handle in inputs], results)
        made = plan(graph.program, self._budget, of_peak=self._of_peak, **self._how)
        return _Line(graph, layout, wanted, made)

    def __repr__(self) -> str:
        if self._line is None:
            return f"<planned {name_of(self._function)}: not called yet>"
        plan, program = self.plan, self.program
        return (
            f"<planned {program.name}: {len(program.calls)} operations in {plan.computes} runs, peak "
            f"{format_bytes(plan.peak)} of {format_bytes(plan.budget)}, overhead {plan.overhead:.3f}>"
        )


class _Line:
    """The straight line of a plan: operations to compute, and slots to empty."""

    def __init__(self, graph: Graph, layout: Layout, wanted: Any, made: ProgramPlan) -> None:
        self.program = graph.program
        self.plan = made
        self._layout = layout
        self._inputs = graph.inputs
        self._constants = graph.constants
        self._wanted = bind(wanted, graph.slots)
        on: list[list[int]] = [[] for _ in graph.program.sizes]
        for slot, storage in enumerate(graph.program.storages):
            on[storage].append(slot)
        self._steps: list[Compute | list[int]] = [
            graph.computes[number] if kind == "compute" else on[number] for kind, number in made.steps
        ]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots: list[Any] = [None] * len(self.program.storages)
        for slot, payload in self._constants:
            slots[slot] = payload
        for slot, payload in zip(self._inputs, self._layout.match(args, kwargs), strict=True):
            slots[slot] = payload
        for step in self._steps:
            if isinstance(step, list):
                for slot in step:
                    slots[slot] = None
            else:
                step.run(slots)
        return fill(self._wanted, slots)
