"""Operation, storage, value: the recorded program.

References run from results to what they were made of (value -> operation -> arguments), so a recipe lives exactly as
long as something can need it. The way back (value -> users) is unlinked by the engine when an operation is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import getweakrefs, ref

from recompute._engine.functions import line_of
from recompute._engine.states import COMING
from recompute._policy.candidate import Candidate
from recompute.text import name_of

if TYPE_CHECKING:
    from recompute._engine.device_tiers import Copy
    from recompute._engine.finalizer import HeldReference
    from recompute._engine.neighbours import Component
    from recompute._engine.pool import Pool
    from recompute._engine.randomness import Draw

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


class Operation:
    """One application of a function, and how to run it again."""

    __slots__ = (
        "arguments",
        "c0",
        "code",
        "function",
        "instruction",
        "number",
        "options",
        "outputs",
        "positional",
        "runs",
    )

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
        """What the function takes, with a value, or a `Container` of them, instead of each Recomputable."""
        self.arguments = arguments
        """Every value it depends on, those that its function asked for at run time included."""
        self.options = options
        self.outputs: Sequence[Value | None] = ()
        """A list if several; None for what can never be needed again. Empty before the first run, and in the end."""
        self.number = 0
        """Of its first output: the others follow it."""
        self.c0 = 0.0
        """Seconds that one run takes, without what it spends in the cache."""
        self.runs = 0
        self.code = code
        self.instruction = instruction

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def created(self) -> str:
        code = self.code
        if code is None:
            return "an unknown place"
        return f"{code.co_filename}:{line_of(code, self.instruction)}"

    @property
    def nout(self) -> int:
        """How many outputs it has; 0: the first run tells."""
        return 1 if self.options is None else self.options.nout

    @property
    def keywords(self) -> dict[str, Any] | None:
        """The arguments by name, as `positional`."""
        return None if self.options is None else self.options.keywords

    def __repr__(self) -> str:
        return f"<{self.name}, created at {self.created}>"


class Value:
    """One output of an operation, or a source: what a `Recomputable` refers to."""

    __slots__ = ("number", "operation", "outlined", "payload", "pinned", "references", "remains", "storage", "users")

    def __init__(self) -> None:
        self.payload: Any = EVICTED
        self.operation: Operation | None = None
        """None: a source."""
        self.storage: Storage = NOWHERE
        self.number = 0
        """In order of creation; events and traces know it by this."""
        self.references: Reference | dict[int, Reference] | None = None
        """Of the Recomputables that refer to it; several by identity."""
        self.users: Operation | dict[Operation, None] | None = None
        """The operations that take it: mostly one, so no dict is made for that."""
        self.pinned = False
        self.outlined = False
        """Whether a Recomputable that referred to it reads its outline while it is evicted."""
        self.remains: Remains | None = None

    @property
    def referred(self) -> bool:
        """Whether the program refers to it, as far as dropped references were processed."""
        return self.references is not None

    def reference_of(self, handle: Any) -> Reference | None:
        """The reference that a Recomputable of this value has; None if it is gone already, or was not made yet."""
        references = self.references
        if references is None:
            return None
        if not isinstance(references, dict):
            return references if references() is handle else None
        return next((reference for reference in getweakrefs(handle) if id(reference) in references), None)

    def forget_reference(self, reference: Reference) -> bool:
        """One outside reference less; whether it was known."""
        known = self.references
        if known is reference:
            self.references = None
            return True
        if isinstance(known, dict) and known.pop(id(reference), None) is not None:
            if len(known) < 2:
                self.references = next(iter(known.values()), None)
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
        return () if users is None else users if isinstance(users, dict) else (users,)

    def add_user(self, operation: Operation) -> None:
        users = self.users
        if users is None or users is operation:
            self.users = operation
        elif isinstance(users, dict):
            users[operation] = None
        else:
            self.users = {users: None, operation: None}

    def remove_user(self, operation: Operation) -> None:
        users = self.users
        if users is operation:
            self.users = None
        elif isinstance(users, dict):
            users.pop(operation, None)
            if not users:
                self.users = None

    @property
    def is_there(self) -> bool:
        """Whether its payload is in memory."""
        return self.payload is not EVICTED

    @property
    def is_gone(self) -> bool:
        """Whether nothing brings it back."""
        return self.payload is EVICTED and self.operation is None and self.remains is None

    @property
    def stays(self) -> bool:
        """Whether it keeps its storage in memory: a source does, unless it may move to a tier."""
        return self.operation is None and (self.remains is None or not self.remains.movable)

    @property
    def copy(self) -> Copy | None:
        """What a tier has of it."""
        return None if self.remains is None else self.remains.copy

    def __repr__(self) -> str:
        made_by = "" if self.operation is None else f" of {self.operation!r}"
        return f"<value {self.number}{made_by}>"


class Storage(Candidate):
    """A buffer: `size` bytes in one pool, shared by its `values`. The unit of eviction."""

    __slots__ = (
        "buffer",
        "dropped",
        "held",
        "nearby",
        "pool",
        "resident",
        "seen",
        "state",
        "values",
    )

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """That of its first value, as events and traces know it."""
        self.pool: Pool = None  # type: ignore[assignment]  # before it is entered
        self.size = 0
        self.buffer = 0
        """The identity of the memory, while resident; 0: never shared."""
        self.last_access = 0.0
        self.cost = 0.0
        """Seconds: the operations that make the values on it, each once."""
        self.locks = 0
        """Operations in flight, pins and sources; a candidate for eviction has none."""
        self.slot = -1
        self.state = COMING
        """See `states`; the machine alone changes it, and what follows from it:"""
        self.resident = False
        """In memory."""
        self.dropped = False
        """Evicted, and only its recipe brings it back. One with a copy in a tier is neither resident nor dropped."""
        self.seen = 0
        """The number of the newest walk that came by."""
        self.values: tuple[Value, ...] | dict[Value, None] = ()
        """Those on it, in the order in which they came; a dict if they are several."""
        self.nearby: Component | tuple[float, float] | None = None
        """What the evicted neighbourhood remembers of it."""
        self.held: Held | None = None
        """While it is evicted, and the program holds its buffer."""

    def needed_outside(self) -> bool:
        """Whether a value on it is referred to from outside."""
        values = self.values
        if isinstance(values, tuple):
            if not values:
                return False
            value = values[0]
            return value.references is not None
        newest = next(reversed(values))
        if newest.references is not None:
            return True
        for value in values:
            if value.references is not None:
                return True
        return False

    def is_vacant(self) -> bool:
        """Whether no value on it is in memory; mostly the first one is, and the look ends there."""
        for value in self.values:
            if value.payload is not EVICTED:
                return False
        return True

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
        outputs = operation.outputs
        if len(outputs) < 2:
            return False
        if len(self.values) < len(outputs):
            return any(value is not but and value.operation is operation for value in self.values)
        place = but.number - operation.number
        for distance in range(1, len(outputs)):
            for near in (place - distance, place + distance):
                output = outputs[near] if 0 <= near < len(outputs) else None
                if output is not None and output.storage is self:
                    return True
        return False

    def neighbours_up(self) -> tuple[Storage, ...]:
        """The storages it is made from, each once."""
        if len(self.values) == 1:  # mostly, made of one argument
            (value,) = self.values
            operation = value.operation
            if operation is None or not operation.arguments:
                return ()
            if len(operation.arguments) == 1:
                home = operation.arguments[0].storage
                return () if home is self else (home,)
        found: dict[Storage, None] = {}
        for value in self.values:
            if value.operation is not None:
                for argument in value.operation.arguments:
                    if argument.storage is not self:
                        found[argument.storage] = None
        return tuple(found)

    def __repr__(self) -> str:
        return f"<storage {self.number}>"


class Held:
    """Bytes that the program keeps, mostly of an evicted value: counted as used until that ends."""

    __slots__ = ("alone", "buffer", "number", "payloads", "pool", "reference", "settles", "size", "storage")

    def __init__(self, pool: Pool, size: int, number: int, buffer: int, alone: bool = False) -> None:
        self.alone = alone  # it was never a value's: to listeners it is a source
        self.buffer = buffer  # its identity
        self.number = number  # of the storage
        self.payloads: dict[int, ref[Any] | None] = {}  # number of a value -> what it had on this buffer
        self.pool = pool
        self.size = size
        self.reference: HeldReference | None = None
        self.storage: Storage | None = None  # from which it was evicted, as long as it can be taken back
        self.settles: ref[Any] | None = None  # another one, whose callback processes the queue

    def payload_of(self, value: Value) -> Any:
        """What a value had on this buffer, if the program holds that; else None."""
        known = self.payloads.get(value.number)
        return None if known is None else known()


NOWHERE: Final = Storage()
"""The storage of a value that has none yet."""


class Options:
    """What few operations have: arguments by name, several outputs, declared sizes."""

    __slots__ = ("declared", "device", "draws", "keywords", "living", "nout", "room")

    def __init__(
        self,
        keywords: dict[str, Any] | None = None,
        nout: int = 1,
        declared: tuple[int, ...] | None = None,
        device: str | None = None,
    ) -> None:
        self.keywords = keywords
        self.nout = nout  # outputs; 0: the first run tells
        self.declared = declared  # bytes of each output, if the caller said
        self.device = device  # where they will be; None: where the first argument is
        self.draws: Sequence[Draw] | None = None  # of random numbers, so that a repeated run draws the same
        self.living = 0  # how many of several outputs may still be needed
        self.room: Sequence[tuple[str, int]] | None = None
        """(device, bytes) that several outputs took, forgotten ones too."""


class Remains:
    """What is left of an evicted value, or kept beside one that may leave memory."""

    __slots__ = ("copy", "movable", "outline")

    def __init__(self) -> None:
        self.copy: Copy | None = None  # what a tier has of it; still there when it is in memory again
        self.movable = False  # of a source: it may leave memory, because a tier takes it
        self.outline: Any = None  # what its adapter wants to know of it while it is evicted


def remains_of(value: Value) -> Remains:
    if value.remains is None:
        value.remains = Remains()
    return value.remains


def copy_of(storage: Storage) -> Copy | None:
    """The copy from which all on a storage can be made again, written or not; None: there is none."""
    for value in storage.values:
        if value.remains is not None and value.remains.copy is not None:
            return value.remains.copy
    return None


def tier_of(storage: Storage) -> str:
    """The name of the tier that has a copy of a storage; empty: none."""
    copy = copy_of(storage)
    return "" if copy is None else copy.store.name
