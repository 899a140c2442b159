"""Staging: record a function once, plan with the future known, and from then on run the plan, a straight line.

A staged call searches for nothing, counts nothing and takes no lock: it computes and frees in the planned order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from recompute._adapters.adapter import Adapter, kinds
from recompute._adapters.python import ATOMIC
from recompute._budget import Amount, bytes_or_share, format_bytes
from recompute._cache import Cache
from recompute._errors import StagingError
from recompute._recomputable import Recomputable, pure
from recompute._traces.program import Program
from recompute.events import Event, Performed
from recompute.extend import Container, EngineOptions, Node, pack

if TYPE_CHECKING:
    from recompute._plans.schedule import Plan

K = TypeVar("K")
R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
R_co = TypeVar("R_co", covariant=True)

_CONTAINERS: Final = (list, tuple, dict)


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
    recorder = _Recorder(number if isinstance(number, int) else None)
    with recorder:
        inputs: list[Recomputable[Any]] = []
        layout = _Layout()
        args = layout.take(example_args, "the positional arguments", inputs)
        kwargs = layout.take(example_kwargs, "the keyword arguments", inputs)
        result = function(*args, **kwargs)
        found: list[Node] = []
        wanted = pack(result, [], found)
        if not found:
            raise StagingError(f"{_name(function)} returned no Recomputable, but a {type(result).__name__}")
        graph = _Graph(_name(function), recorder, [handle.node for handle in inputs], found)
    planned = plan(graph.program, number, method=method, time_limit=time_limit)
    staged: Staged[Any] = Staged(graph, layout, wanted, planned)
    update_wrapper(staged, function, updated=())
    return staged


class Staged(Generic[R_co]):
    """What `stage` returns: call it like the function that was staged."""

    def __init__(self, graph: _Graph, layout: _Layout, wanted: Any, planned: Plan) -> None:
        self.program: Final = graph.program
        """What was recorded."""
        self.plan: Final = planned
        """The schedule: its overhead, its peak, its steps."""
        self._layout = layout
        self._inputs = graph.inputs
        self._constants = graph.constants
        self._wanted = _bind(wanted, graph.slots)
        self._slots = len(graph.program.storages)
        on: list[list[int]] = [[] for _ in graph.program.sizes]
        for slot, storage in enumerate(graph.program.storages):
            on[storage].append(slot)
        self._steps: list[_Compute | list[int]] = [
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
        return _fill(self._wanted, slots)  # type: ignore[no-any-return]  # as the function had it

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"<staged {self.program.name}: {len(self.program.calls)} operations in {plan.computes} runs, peak "
            f"{format_bytes(plan.peak)} of {format_bytes(plan.budget)}, overhead {plan.overhead:.3f}>"
        )


class _Recorder(Cache):
    """The cache that the example runs in: it refuses what would make the graph depend on a value."""

    def __init__(self, budget: int | None) -> None:
        super().__init__(budget, engine=EngineOptions(before_bringing=_refuse, warns=False))
        self.made: dict[int, tuple[int, int]] = {}  # value -> (storage, bytes)
        self.subscribe(self._record_sizes)

    def _record_sizes(self, event: Event) -> None:
        if isinstance(event, Performed) and not event.again:
            sizes = dict(zip(event.storages, event.nbytes, strict=True))
            self.made.update(
                (value, (storage, sizes[storage])) for value, storage in zip(event.results, event.homes, strict=True)
            )


def _refuse() -> None:
    raise StagingError(
        "get, pin and detach cannot be staged: what is recorded would depend on the values of this one run; return "
        "the Recomputable, or make the value before and pass it as an argument"
    )


@dataclass(frozen=True)
class _Slot:
    """Stands for a value among arguments and results."""

    number: int


class _Compute:
    """One operation of the straight line."""

    __slots__ = ("created", "function", "keywords", "name", "nout", "positional", "results", "sizes")

    def __init__(self, operation: Node, slots: dict[Node, int], results: list[int], sizes: list[int]) -> None:
        self.function = operation.function
        self.positional = [_bind(part, slots) for part in operation.positional]
        keywords = operation.keywords
        self.keywords = None if keywords is None else {name: _bind(part, slots) for name, part in keywords.items()}
        self.nout = operation.nout
        self.results = results
        self.sizes = sizes
        self.name = operation.name
        self.created = operation.created

    def run(self, slots: list[Any]) -> None:
        positional = [_fill(part, slots) for part in self.positional]
        keywords = {} if self.keywords is None else {name: _fill(part, slots) for name, part in self.keywords.items()}
        result = self.function(*positional, **keywords)
        made = (result,) if self.nout == 1 else tuple(result)
        if len(made) != self.nout:
            raise self._other(f"returned {len(made)} values instead of {self.nout}")
        for slot, size, payload in zip(self.results, self.sizes, made, strict=True):
            found = kinds[type(payload)].nbytes(payload)
            if found > size:
                raise self._other(f"made {format_bytes(found)} instead of {format_bytes(size)}")
            if slots[slot] is None:  # else it is there, and views of it may be: the second copy goes
                slots[slot] = payload

    def _other(self, what: str) -> StagingError:
        return StagingError(
            f"this is not the graph that was planned: {self.name} (created at {self.created}) {what}; stage the "
            "function again, with arguments like these"
        )


class _Graph:
    """The recorded operations that the results need, as a program and as functions to call."""

    def __init__(self, name: str, recorder: _Recorder, inputs: list[Node], wanted: list[Node]) -> None:
        operations: dict[Node, None] = {}
        sources: dict[Node, None] = dict.fromkeys(inputs)
        stack = [*wanted]
        seen = set(stack)
        while stack:
            value = stack.pop()
            if value.operation is None:
                sources.setdefault(value)
            elif value.operation not in operations:
                operations[value.operation] = None
                new = [argument for argument in value.operation.arguments if argument not in seen]
                seen.update(new)
                stack += new
        program = self.program = Program(name)
        self.slots: dict[Node, int] = {}
        for value in sources:
            self.slots[value] = program.add_source(value.storage.size, value.storage.pool.device)
        self.inputs = [self.slots[value] for value in inputs]
        self.constants = [(slot, value.payload) for value, slot in self.slots.items() if value not in set(inputs)]
        self.computes: list[_Compute] = []
        storages = {value.storage.number: program.storages[slot] for value, slot in self.slots.items()}
        for operation in sorted(operations, key=_first):
            self._add(operation, recorder, storages)
        results = dict.fromkeys(self.slots[value] for value in wanted)
        program.outputs = [slot for slot in results if program.makers[slot] >= 0]
        _drop_after_use(program)

    def _add(self, operation: Node, recorder: _Recorder, storages: dict[int, int]) -> None:
        numbers = range(_first(operation), _first(operation) + operation.nout)
        made = [recorder.made[number] for number in numbers]
        device = next(output.storage.pool.device for output in operation.outputs if output is not None)
        for storage, size in made:
            if storage not in storages:
                storages[storage] = self.program.add_storage(size, device)
        missing = [argument for argument in operation.arguments if argument not in self.slots]
        assert not missing, f"{operation} takes values that nothing made"
        arguments = [self.slots[argument] for argument in operation.arguments]
        results = self.program.add_call(
            operation.name, arguments, [storages[storage] for storage, _ in made], operation.c0
        )
        for slot, value in zip(results, operation.outputs, strict=True):
            if value is not None:
                self.slots[value] = slot
        self.computes.append(_Compute(operation, self.slots, list(results), [size for _, size in made]))


def _drop_after_use(program: Program) -> None:
    """Drop each value after its last use: the peak is what the function needs if nothing is computed twice."""
    last = dict.fromkeys(program.outputs, len(program.calls))
    steps = [step for step in program.steps if step[0] == "source"]
    dropped: list[list[int]] = [[] for _ in program.calls]
    for number in range(len(program.calls) - 1, -1, -1):
        call = program.calls[number]
        for value in (*call.arguments, *call.results):
            if value not in last and program.makers[value] >= 0:
                last[value] = number
                dropped[number].append(value)
    for number, values in enumerate(dropped):
        steps.append(("call", number))
        steps += [("drop", value) for value in values]
    program.steps[:] = steps


def _first(operation: Node) -> int:
    """The number of its first output, which may be forgotten: those of one operation are consecutive."""
    return next(value.number - at for at, value in enumerate(operation.outputs) if value is not None)


class _Layout:
    """Which of the arguments are inputs, what they look like, and what the others are."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Any]] = []  # where, and signature or structure, in the order of a walk

    def take(self, argument: Any, where: str, inputs: list[Recomputable[Any]]) -> Any:
        """The example with its inputs as sources, which are added to `inputs`."""
        if isinstance(argument, _CONTAINERS):
            self._known.append((where, _structure(argument)))
            if isinstance(argument, dict):
                argument = {key: argument[key] for key in sorted(argument, key=_by_type)}
                return {key: self.take(part, _inside(where, key), inputs) for key, part in argument.items()}
            parts = [self.take(part, _inside(where, at), inputs) for at, part in enumerate(argument)]
            return parts if isinstance(argument, list) else _rebuild(argument, parts)
        payload = argument.get() if isinstance(argument, Recomputable) else argument
        if not isinstance(argument, Recomputable) and not _is_input(payload):
            self._known.append((where, _Equal(payload)))
            return argument
        self._known.append((where, _look(payload)))
        inputs.append(pure(payload))
        return inputs[-1]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The payloads of the inputs, in order. Raises StagingError if the arguments are not like the examples."""
        payloads: list[Any] = []
        stack: list[Any] = [kwargs, args]
        for where, known in self._known:
            argument = stack.pop()
            if isinstance(known, _Equal):
                if not known.to(argument):
                    raise _unlike(where, f"{repr(argument)[:60]} instead of {repr(known.value)[:60]}")
            elif isinstance(argument, _CONTAINERS):
                if _structure(argument) != known:
                    raise _unlike(where, _describe(argument))
                if isinstance(argument, dict):
                    stack.extend(argument[key] for key in reversed(known[1]))
                else:
                    stack.extend(reversed(argument))
            else:
                payload = argument.get() if isinstance(argument, Recomputable) else argument
                if _look(payload) != known:
                    raise _unlike(where, _describe(payload))
                payloads.append(payload)
        return payloads


@dataclass(frozen=True)
class _Equal:
    """An argument that is part of the graph."""

    value: Any

    def to(self, other: Any) -> bool:
        if other is self.value:
            return True
        try:
            return type(other) is type(self.value) and bool(other == self.value)
        except Exception:  # whatever a foreign == raises: it did not say yes
            return False


def _is_input(payload: Any) -> bool:
    cls = type(payload)
    served = kinds[cls].adapter.name != Adapter.name or hasattr(cls, "__array__") or hasattr(cls, "__dlpack__")
    return served and cls not in ATOMIC


def _look(payload: Any) -> Any:
    signature = kinds[type(payload)].signature
    return type(payload), None if signature is None else signature(payload)


def _structure(container: Any) -> Any:
    return type(container), sorted(container, key=_by_type) if isinstance(container, dict) else len(container)


def _by_type(key: Any) -> tuple[str, str]:
    return type(key).__name__, str(key)


def _rebuild(like: Any, parts: list[Any]) -> Any:
    return type(like)._make(parts) if hasattr(like, "_make") else type(like)(parts)


def _inside(where: str, key: Any) -> str:
    return f"argument {key!r}" if where.startswith("the ") else f"{where}[{key!r}]"


def _describe(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    if shape is not None:
        return f"{type(value).__name__} {dtype}{list(shape)}"
    if isinstance(value, _CONTAINERS):
        return f"{type(value).__name__} of {list(value) if isinstance(value, dict) else len(value)}"
    return type(value).__name__


def _unlike(where: str, what: str) -> StagingError:
    return StagingError(
        f"this is not the graph that was planned: {where} differ{'' if where.startswith('the ') else 's'} from the "
        f"example: {what}; stage the function again, with arguments like these"
    )


def _bind(part: Any, slots: dict[Node, int]) -> Any:
    """A packed argument with slots in the place of values."""
    if type(part) is Node:
        return _Slot(slots[part])
    if type(part) is Container:
        return Container(part.build, [_bind(inner, slots) for inner in part.parts])
    return part


def _fill(part: Any, slots: list[Any]) -> Any:
    if type(part) is _Slot:
        return slots[part.number]
    if type(part) is Container:
        return part.build([_fill(inner, slots) for inner in part.parts])
    return part


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).replace(".<locals>", "")
