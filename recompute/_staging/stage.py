"""`stage`: record a function, plan, and run the plan.

A staged call searches for nothing, counts nothing and takes no lock: it computes and frees in the planned order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from recompute._budget import Amount, bytes_or_share, format_bytes
from recompute._errors import StagingError
from recompute._recomputable import Recomputable
from recompute._staging.arguments import Layout
from recompute._staging.graph import Graph, Recorder
from recompute._staging.line import Compute, bind, fill
from recompute.extend import Value, pack

if TYPE_CHECKING:
    from recompute._plans.schedule import ProgramPlan

K = TypeVar("K")
R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
R_co = TypeVar("R_co", covariant=True)


@overload
def stage(
    function: Callable[..., Recomputable[R]],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[R]: ...
@overload
def stage(
    function: Callable[..., tuple[Recomputable[R1], Recomputable[R2]]],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[tuple[R1, R2]]: ...
@overload
def stage(
    function: Callable[..., tuple[Recomputable[R], ...]],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[tuple[R, ...]]: ...
@overload
def stage(
    function: Callable[..., list[Recomputable[R]]],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[list[R]]: ...
@overload
def stage(
    function: Callable[..., dict[K, Recomputable[R]]],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[dict[K, R]]: ...
@overload
def stage(
    function: Callable[..., Any],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[Any]: ...
def stage(
    function: Callable[..., Any],
    /,
    *example_args: Any,
    budget: Amount,
    method: str = "own",
    time_limit: float = 60.0,
    **example_kwargs: Any,
) -> Staged[Any]:
    """A function that does what `function` does, within `budget`, by a plan made in advance.

    `function` is run once, with the example arguments. It makes its results with `ap` (or `lift`, `map`, ...) from its
    arguments and returns Recomputables, alone or in tuples, lists and dicts; the staged function takes arguments
    like the examples, and returns plain values in the same tuples, lists and dicts.

    Parameters
    ----------
    *example_args, **example_kwargs
        Arrays (values that an adapter serves) and Recomputables, also inside tuples, lists and dicts, become inputs:
        later ones must have the same shapes and types. Everything else is part of the graph: later ones must be equal.
    budget
        Bytes ("512MB") for inputs, constants, intermediate and final results together, or a share (0.4, "40%") of the
        peak of the example without a budget. For bytes, the example runs within the budget, too.
    method, time_limit
        As for `recompute.planners.plan`: how to plan, and how many seconds that may take.

    Raises StagingError if the graph depends on a value (`get` or `detach` while it is recorded), PlanError if nothing
    fits, and what the function raises. Calls raise StagingError if arguments or results are not as planned.
    """
    from recompute._plans.plan import plan

    number = bytes_or_share(budget)
    recorder = Recorder(number if isinstance(number, int) else None)
    with recorder:
        inputs: list[Recomputable[Any]] = []
        layout = Layout()
        args = layout.take(example_args, "the positional arguments", inputs)
        kwargs = layout.take(example_kwargs, "the keyword arguments", inputs)
        result = function(*args, **kwargs)
        found: list[Value] = []
        wanted = pack(result, [], found)
        if not found:
            raise StagingError(f"{_name(function)} returned no Recomputable, but a {type(result).__name__}")
        graph = Graph(_name(function), recorder, [handle.node for handle in inputs], found)
    planned = plan(graph.program, number, method=method, time_limit=time_limit)
    staged: Staged[Any] = Staged(graph, layout, wanted, planned)
    update_wrapper(staged, function, updated=())
    return staged


class Staged(Generic[R_co]):
    """What `stage` returns: call it like the function that was staged."""

    def __init__(self, graph: Graph, layout: Layout, wanted: Any, planned: ProgramPlan) -> None:
        self.program: Final = graph.program
        """What was recorded."""
        self.plan: Final = planned
        """The schedule: its overhead, its peak, its steps."""
        self._layout = layout
        self._inputs = graph.inputs
        self._constants = graph.constants
        self._wanted = bind(wanted, graph.slots)
        self._slots = len(graph.program.storages)
        on: list[list[int]] = [[] for _ in graph.program.sizes]
        for slot, storage in enumerate(graph.program.storages):
            on[storage].append(slot)
        self._steps: list[Compute | list[int]] = [
            graph.computes[which] if kind == "compute" else on[which] for kind, which in planned.steps
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        slots: list[Any] = [None] * self._slots
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
        return fill(self._wanted, slots)  # type: ignore[no-any-return]  # as the function had it

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"<staged {self.program.name}: {len(self.program.calls)} operations in {plan.computes} runs, peak "
            f"{format_bytes(plan.peak)} of {format_bytes(plan.budget)}, overhead {plan.overhead:.3f}>"
        )


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).replace(".<locals>", "")
