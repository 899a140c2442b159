"""Which arrays share memory, and how each is made of the one at the root.

A view of a wrapped array refers to the same `Memory` as that array, and remembers what it was made from: its origin.
From the origins follows a `Path`: the view as a function of the root, by which the same view of another version of the
root can be made. An array that was never looked at through a view has no memory to share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final
from weakref import ref

from recompute import extend, text
from recompute._locks import RLock
from recompute._recomputable import Recomputable
from recompute.extend import EVICTED, Operation, Outputs, Value

_creating: Final = RLock()  # of the memory of an array: two threads may take a view of it at the same time


class Origin:
    """What a view is made from: a node, and its parents among those that share its memory, with their origins."""

    __slots__ = ("node", "parents")

    def __init__(self, node: Value, parents: tuple[tuple[Value, Origin | None], ...]) -> None:
        self.node = node
        self.parents = parents  # origin None: the root


class Memory:
    """What an array and its views share. It lives as long as one of them.

    An array is on the memory that its `_memory` says, so that it joins or leaves by one assignment, which no interrupt
    can leave half done. `members` has all that are on it, and maybe one that has left.
    """

    __slots__ = ("members", "root")

    def __init__(self, root: Value | None) -> None:
        self.root = root  # in its present version; None: it is unknown of what array the others are views
        self.members: set[Member] = set()

    def join(self, array: Any, origin: Origin | None) -> None:
        """One more array on this memory."""
        array._origin = origin
        self.members.add(Member(array, self.members.discard))  # nothing in Python: an interrupt there would be lost
        array._memory = self

    def leave(self, array: Any) -> None:
        """Give the array memory of its own."""
        array._memory = None
        self.members.difference_update([member for member in self.members if member() is array])

    def arrays(self) -> list[Any]:
        """Those that are on it."""
        return [array for member in list(self.members) if (array := member()) is not None and memory_of(array) is self]


class Member(ref):  # type: ignore[type-arg]  # a subclass of ref cannot be generic
    """A weak reference to an array on a memory; each is another one, whatever their arrays are."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Sharer(Recomputable[Any]):
    """An array that may share memory."""

    __slots__ = ("_memory", "_origin")  # both unset until a view of it is taken
    _memory: Memory | None
    _origin: Origin | None


_get_memory: Final[Callable[[Any], Memory | None]] = Sharer.__dict__["_memory"].__get__
"""Faster than `array._memory` where that is unset: nothing asks `__getattr__` then."""


def memory_of(array: Any) -> Memory | None:
    """What an array shares with others; None: nothing, or it is no array."""
    try:
        return _get_memory(array)
    except (AttributeError, TypeError):  # no view of it was taken
        return None


def link(view: Any, operands: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """`view` is a new result on memory that is not its own: that of some of the operands, or of another output.

    Returns what it is to the program: the operand itself, if the function has returned that.
    """
    cls, storage = type(view), view._node.storage
    parents = {id(array): array for array in operands if type(array) is cls and array._node.storage is storage}.values()
    if not parents:
        _link_outputs(view, [array for array in outputs if type(array) is cls and array._node.storage is storage])
        return view
    if len(parents) == 1:
        (parent,) = parents
        if _name_of(view._node.operation.function) in SAME and _geometry(view) == _geometry(parent):
            return parent
    memories = []
    for parent in parents:
        memory = memory_of(parent)
        if memory is None:
            with _creating:
                memory = memory_of(parent)
                if memory is None:
                    memory = Memory(parent._node)
                    memory.join(parent, None)
        memories.append(memory)
    memory = memories[0]
    if any(other is not memory for other in memories):  # arrays that are copies to the program, of one value
        for other in memories:
            other.root = None
    memory.join(view, Origin(view._node, tuple([(parent._node, parent._origin) for parent in parents])))
    return view


def _geometry(array: Any) -> tuple[Any, ...]:
    outline = array._outline()
    return array._type, outline.shape, outline.dtype, getattr(outline, "strides", None)


def _link_outputs(view: Any, others: Sequence[Any]) -> None:
    """Outputs of one operation that overlap, but not in a way that could be repeated in another version."""
    share = getattr(view._adapter.namespace(), "shares_memory", None)
    for other in others:
        if other is not view and share is not None:
            one, two = view._node.payload, other._node.payload
            if one is EVICTED or two is EVICTED or share(one, two):
                memory = memory_of(other)
                if memory is None:
                    memory = Memory(None)
                    memory.join(other, None)
                memory.join(view, None)
                return


class Place:
    """Stands for what a path has made, or was given, at some number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Step:
    """One view of another: an operation with places in it."""

    __slots__ = ("function", "output", "positional")

    def __init__(self, function: Callable[..., Any], positional: tuple[Any, ...], output: int) -> None:
        self.function = function
        self.positional = positional
        self.output = output

    def __call__(self, made: list[Any]) -> Any:
        result = self.function(*[made[part.number] if type(part) is Place else part for part in self.positional])
        return result[self.output] if type(result) is Outputs else result

    def moved(self, numbers: Sequence[int]) -> Step:
        """The same with other numbers at its places."""
        placed = [Place(numbers[part.number]) if type(part) is Place else part for part in self.positional]
        return Step(self.function, tuple(placed), self.output)

    def same(self, other: Step) -> bool:
        """Whether both do the same with the same."""
        if self.function is not other.function or len(self.positional) != len(other.positional):
            return False
        for one, two in zip(self.positional, other.positional, strict=True):
            if one is not two and not (type(one) is Place and type(two) is Place and one.number == two.number):
                return False
        return True


class Path:
    """A view as a function of the root and of whatever else it takes, such as a wrapped index."""

    __slots__ = ("func", "given", "steps")

    def __init__(self, steps: Sequence[Step], given: int) -> None:
        self.steps = tuple(steps)
        self.given = given
        self.func = steps[-1].function  # by which it is named

    def __call__(self, *given: Any) -> Any:
        made = list(given)
        for step in self.steps:
            made.append(step(made))
        return made[-1]

    def size_key(self) -> Hashable:
        return tuple([extend.identity(step.function) for step in self.steps])


def path_of(origin: Origin) -> tuple[Path, list[Value]]:
    """How to make a view of the root, and what else that takes. Raises RuntimeError if it has been forgotten."""
    order: list[Origin] = []
    stack: list[tuple[Origin, bool]] = [(origin, False)]
    while stack:
        origin, seen = stack.pop()
        if seen:
            order.append(origin)
        else:
            stack.append((origin, True))
            stack += [(parent, False) for _, parent in origin.parents if parent is not None]
    inputs: list[Value] = []  # what is given besides the root
    for origin in order:
        shared = {node for node, _ in origin.parents}
        for part in _operation_of(origin).positional:
            if type(part) is Value and part not in shared and part not in inputs:
                inputs.append(part)
    places = {node: 1 + number for number, node in enumerate(inputs)}
    given = 1 + len(inputs)
    steps: list[Step] = []
    made: dict[Origin, int] = {}
    for origin in order:
        if origin in made:
            continue
        numbers = {node: 0 if parent is None else made[parent] for node, parent in origin.parents}
        operation = _operation_of(origin)
        where = [
            numbers[part] if part in numbers else places[part] for part in operation.positional if type(part) is Value
        ]
        function = operation.function
        if type(function) is Path:  # its steps in its place, so that paths do not nest
            where += range(given + len(steps), given + len(steps) + len(function.steps))
            steps += [step.moved(where) for step in function.steps]
        else:
            left = iter(where)
            positional = [Place(next(left)) if type(part) is Value else part for part in operation.positional]
            output = operation.outputs.index(origin.node) if len(operation.outputs) > 1 else 0
            steps.append(Step(function, tuple(positional), output))
        made[origin] = given + len(steps) - 1
    return Path(steps, given), inputs


def _operation_of(origin: Origin) -> Operation:
    operation = origin.node.operation
    if operation is None or not operation.outputs:
        raise RuntimeError(
            "the array shares memory with another one that was detached, so that it is no longer known how; change a "
            "copy: x = x.copy()"
        )
    return operation


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function alone, without class or module."""
    return text.name_of(function).rpartition(".")[2]


SAME: Final = frozenset(
    "asarray astype atleast_1d atleast_2d atleast_3d broadcast_arrays conj conjugate real real_if_close squeeze "
    "to_device".split()
)
"""Functions that return their operand itself if there is nothing to do."""

READ_ONLY: Final = frozenset({"broadcast_to", "diag", "diagonal", "sliding_window_view"})
"""Functions whose views cannot be written to."""


def check_writable(array: Any) -> None:
    """Raise ValueError, as NumPy does, for a view that is read-only there, or elements that lie on each other.

    So is the imaginary part of real numbers, which is no view; not that of a scalar, which has none either.
    """
    memory = memory_of(array)
    root = array._node if memory is None or memory.root is None else memory.root
    imaginary = root.operation is not None and _name_of(root.operation.function) == "imag"
    read_only = _overlaps(array._outline()) or (imaginary and hasattr(array._type, "__setitem__"))
    if root is not array._node:
        read_only = read_only or _overlaps(extend.outline_of(root) if root.payload is EVICTED else root.payload)
    origin = None if memory is None else array._origin
    while origin is not None and not read_only:
        operation = _operation_of(origin)
        function = operation.function
        steps = [step.function for step in function.steps] if type(function) is Path else [function]
        read_only = any(_name_of(step) in READ_ONLY for step in steps)
        origin = origin.parents[0][1]
    if read_only:
        raise ValueError(
            "assignment destination is read-only: the array has fewer elements of its own than it shows, or is the "
            "imaginary part of real numbers; change a copy of it"
        )


def _overlaps(outline: Any) -> bool:
    """Whether elements of an array lie on each other, as those do that `broadcast_to` made."""
    strides = getattr(outline, "strides", None)
    if strides is None or 0 not in strides or 0 in outline.shape:
        return False
    return any(length > 1 and step == 0 for length, step in zip(outline.shape, strides, strict=True))
