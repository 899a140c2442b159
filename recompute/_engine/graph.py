"""Operation, storage, value: the recorded program.

References run from results to what they were made of (value -> operation -> arguments), so a recipe lives exactly as
long as something can need it. The way back (value -> users) is unlinked by the engine when an operation is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from weakref import ReferenceType, getweakrefs, ref

if TYPE_CHECKING:
    from recompute._engine.copies import Copy
    from recompute._engine.finalizer import Held
    from recompute._engine.pool import Pool
    from recompute._policy.neighbourhoods import Component

ReleaseMode = Literal["ignore", "eager", "banish"]


class _Evicted:
    """The payload of a value that is not in memory."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<evicted>"

    def __reduce__(self) -> str:
        return "EVICTED"


EVICTED: Final = _Evicted()


class Reference(ref):  # type: ignore[type-arg]  # a subclass of ref cannot be generic and have slots
    """A weak reference to a `Recomputable`: what its value knows of it.

    Its callback is the news that the Recomputable has gone. Should an interrupt keep that from arriving, it is seen.
    """

    __slots__ = ("value",)
    value: Value


class Node:
    """An operation, its output, and the storage that the output lives on: one object plays all three parts.

    So it is for an operation of one output with memory of its own, which is nearly every one. An operation of several
    outputs is a node by itself, and each output another; an output that shares memory is not its own storage. Code
    names a node after the part that it plays where it is used: see `Operation`, `Storage` and `Value`.
    """

    __slots__ = (
        "arguments",
        "buffer",
        "c0",
        "code",
        "cost",
        "dropped",
        "function",
        "instruction",
        "last_access",
        "locks",
        "nearby",
        "number",
        "operation",
        "options",
        "outputs",
        "payload",
        "pinned",
        "pool",
        "positional",
        "references",
        "remains",
        "resident",
        "runs",
        "size",
        "slot",
        "storage",
        "users",
        "values",
    )

    # The operation: one application of a function, and how to run it again.
    function: Callable[..., Any]
    positional: tuple[Any, ...]
    """What the function takes, with a node, or a `Container` of them, in the place of each Recomputable."""
    arguments: tuple[Value, ...]
    """Every value it depends on, those that its function asked for at run time included."""
    options: Options | None
    outputs: Sequence[Value | None]
    """None: can never be needed again. Empty: it has not run yet, or can never be needed again. A list if several."""
    c0: float
    """Seconds that one run takes, without what it spends in the cache."""
    runs: int
    code: CodeType | None
    instruction: int

    # The value: one output of an operation, or a source.
    payload: Any
    operation: Operation | None
    """None: a source."""
    storage: Storage
    number: int
    """In order of creation; events and traces know it by this. A storage has the number of its first value."""
    references: Reference | dict[int, Reference] | None
    """Of the Recomputables that refer to it; several by identity."""
    users: Node | dict[Node, None] | None
    """The operations that take it: mostly one, so no dict is made for that."""
    pinned: bool
    remains: Remains | None

    # The storage: a buffer, the unit of eviction.
    pool: Pool
    size: int
    """Bytes."""
    buffer: int
    """The identity of the memory, while resident; 0: never shared."""
    last_access: float
    """On the compute clock (seconds)."""
    cost: float
    """Seconds: the operations that make the values on it, each once."""
    locks: int
    """Operations in flight, pins and sources; a candidate for eviction has none."""
    slot: int
    """Where the candidate search keeps it; -1: nowhere; less: passed over while it was locked."""
    resident: bool
    dropped: bool
    """Evicted, and only its recipe brings it back. One with a copy in a tier is neither resident nor dropped."""
    values: tuple[Value, ...] | dict[Value, None]
    """Those on it, in the order in which they came; a dict if they are several."""
    nearby: Component | tuple[float, float] | None
    """What the evicted neighbourhood remembers of it."""

    def __init__(
        self,
        function: Callable[..., Any],
        positional: tuple[Any, ...],
        arguments: tuple[Value, ...],
        code: CodeType | None = None,
        instruction: int = 0,
        options: Options | None = None,
    ) -> None:
        self.function = function
        self.positional = positional
        self.arguments = arguments
        self.options = options
        self.code = code
        self.instruction = instruction
        self.outputs = self.values = ()
        self.c0 = self.cost = self.last_access = 0.0
        self.runs = self.number = self.size = self.buffer = self.locks = 0
        self.payload = EVICTED
        self.pool = None  # type: ignore[assignment]  # before it is entered
        self.operation = self.references = self.users = self.remains = self.nearby = None
        self.pinned = self.resident = self.dropped = False
        self.slot = -1
        self.storage = NOWHERE

    # As an operation

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def created(self) -> str:
        code = self.code
        if code is None:
            return "an unknown place"
        lines = [line for start, _, line in code.co_lines() if line is not None and start <= self.instruction]
        return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"

    @property
    def nout(self) -> int:
        """How many outputs it has; 0: the first run tells."""
        return 1 if self.options is None else self.options.nout

    @property
    def keywords(self) -> dict[str, Any] | None:
        """The arguments by name, as `positional`."""
        return None if self.options is None else self.options.keywords

    # As a value

    @property
    def referred(self) -> bool:
        """Whether somebody outside refers to it, as far as the news has come."""
        return self.references is not None

    def reference_of(self, handle: Any) -> Reference | None:
        """The reference that a Recomputable of this value has; None if it is gone already."""
        references = self.references
        if references is None or type(references) is Reference:
            return references
        mine = (each for each in getweakrefs(handle) if type(each) is Reference and each.value is self)
        return next(mine, None)

    def forget_reference(self, reference: Reference) -> bool:
        """One outside reference less; whether it was known."""
        known = self.references
        if known is reference:
            self.references = None
            return True
        if isinstance(known, dict) and known.pop(id(reference), None) is not None:
            if not known:
                self.references = None
            return True
        return False

    def refer(self, reference: Reference) -> None:
        """One more outside reference."""
        reference.value = self
        known = self.references
        if known is None:
            self.references = reference
        elif isinstance(known, dict):
            known[id(reference)] = reference
        else:
            self.references = {id(known): known, id(reference): reference}

    def each_user(self) -> Iterable[Operation]:
        """The operations that take this value."""
        users = self.users
        return () if users is None else (users,) if type(users) is Node else users  # type: ignore[return-value]  # then a dict

    def add_user(self, operation: Operation) -> None:
        users = self.users
        if users is None or users is operation:
            self.users = operation
        elif type(users) is Node:
            self.users = {users: None, operation: None}
        else:
            users[operation] = None  # type: ignore[index]  # it is a dict

    def remove_user(self, operation: Operation) -> None:
        users = self.users
        if users is operation:
            self.users = None
        elif isinstance(users, dict):
            users.pop(operation, None)
            if not users:
                self.users = None

    @property
    def stays(self) -> bool:
        """Whether it keeps its storage in memory: a source does, unless it may move to a tier."""
        return self.operation is None and (self.remains is None or not self.remains.movable)

    @property
    def copy(self) -> Copy | None:
        """What a tier has of it."""
        return None if self.remains is None else self.remains.copy

    # As a storage

    @property
    def needed_outside(self) -> bool:
        """Whether somebody outside refers to a value on it."""
        values = self.values
        if type(values) is tuple:
            return bool(values) and values[0].references is not None
        newest = next(reversed(values))
        return newest.references is not None or any(each.references is not None for each in values)

    def add_value(self, value: Value) -> None:
        """One more value lives on it."""
        values = self.values
        if isinstance(values, dict):
            values[value] = None
        else:
            self.values = (value,) if not values else dict.fromkeys((*values, value))

    def remove_value(self, value: Value) -> None:
        """One value less."""
        values = self.values
        if isinstance(values, dict):
            values.pop(value, None)
            left = len(values)
            if left == 1:
                self.values = tuple(values)
            elif not left & left - 1:  # now and then without the gaps that those before it have left
                self.values = dict.fromkeys(values)
        elif value in values:
            self.values = ()

    def is_made_by(self, operation: Operation, but: Value) -> bool:
        """Whether a value on it is an output of the operation, other than one: mostly the next output is."""
        outputs, options = operation.outputs, operation.options
        if len(outputs) < 2 or options is None:
            return False
        if len(self.values) < len(outputs):
            return any(each is not but and each.operation is operation for each in self.values)
        place = but.number - options.first
        for distance in range(1, len(outputs)):
            for near in (place - distance, place + distance):
                each = outputs[near] if 0 <= near < len(outputs) else None
                if each is not None and each.storage is self:
                    return True
        return False

    def neighbours_up(self) -> Iterator[Storage]:
        """The storages it is made from."""
        for value in self.values:
            if value.operation is not None:
                for argument in value.operation.arguments:
                    if argument.storage is not self:
                        yield argument.storage

    def neighbours_down(self) -> Iterator[Storage]:
        """The storages made from it."""
        for value in self.values:
            for user in value.each_user():
                for output in user.outputs:
                    if output is not None and output.storage is not self:
                        yield output.storage

    def __repr__(self) -> str:
        return f"<{self.name}, created at {self.created}>" if self.code is not None else f"<value {self.number}>"


Operation: TypeAlias = Node
"""A node as the application of a function."""

Value: TypeAlias = Node
"""A node as one result of an operation, or as a source: what a `Recomputable` refers to."""

Storage: TypeAlias = Node
"""A node as a buffer: `size` bytes in one pool, shared by its `values`. The unit of eviction."""


NOWHERE: Final = Node.__new__(Node)
"""The storage of a value that has none yet, or has been forgotten."""
NOWHERE.values = ()
NOWHERE.locks = NOWHERE.number = NOWHERE.size = 0
NOWHERE.remains = NOWHERE.code = None
NOWHERE.resident = NOWHERE.dropped = False


class Options:
    """What few operations have: arguments by name, several outputs, declared sizes."""

    __slots__ = ("declared", "first", "keywords", "living", "nout", "room")

    def __init__(
        self, keywords: dict[str, Any] | None = None, nout: int = 1, declared: tuple[int, ...] | None = None
    ) -> None:
        self.keywords = keywords
        self.nout = nout  # outputs; 0: the first run tells
        self.declared = declared  # bytes of each output, if the caller said
        self.first = 0  # the number of the first of several outputs: the others follow it
        self.living = 0  # how many of several outputs may still be needed
        self.room: Sequence[tuple[str, int]] | None = None
        """(device, bytes) that several outputs took, forgotten ones too."""


class Remains:
    """What is left of an evicted value, or kept beside one that may leave memory."""

    __slots__ = ("copy", "held", "movable", "outline", "payload")

    def __init__(self) -> None:
        self.copy: Copy | None = None  # what a tier has of it; still there when it is in memory again
        self.movable = False  # of a source: it may leave memory, because a tier takes it
        self.outline: Any = None  # what its adapter wants to know of it while it is evicted
        self.payload: ReferenceType[Any] | None = None  # while somebody outside holds it
        self.held: Held | None = None  # of a storage: while somebody outside holds its buffer


def remains_of(value: Value) -> Remains:
    if value.remains is None:
        value.remains = Remains()
    return value.remains


def name_of(function: Any) -> str:
    """A readable name for any callable."""
    for _ in range(8):  # a partial of a partial of ...
        name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
        if isinstance(name, str):
            return qualified(name)
        function = getattr(function, "func", None) or type(function)
    return "?"


def qualified(name: str) -> str:
    """A qualified name without the noise."""
    return name.replace(".<locals>", "")
