"""Operation, storage, value: the recorded program.

References run from results to what they were made of (value -> operation -> arguments), so a recipe lives exactly as
long as something can need it. The way back (value -> users) is unlinked by the cache when an operation dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import ReferenceType

if TYPE_CHECKING:
    from recompute._engine.frames import Frame
    from recompute._engine.memory import Held, Pool
    from recompute._policy.neighbourhoods import Component


class _Evicted:
    """The payload of a value that is not in memory."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<evicted>"


EVICTED: Final = _Evicted()


class Value:
    """One result of an operation, or a source: what a `Recomputable` refers to."""

    __slots__ = ("ghost", "number", "operation", "outline", "payload", "pinned", "refs", "storage", "uses", "using")

    outline: Any  # what remains of it when it is evicted, an array's outline; set by its first eviction

    def __init__(self, payload: Any, operation: Operation | None, storage: Storage, number: int) -> None:
        self.number = number  # in order of creation; events speak of it
        self.payload = payload
        self.operation = operation  # None: a source
        self.storage = storage
        self.refs = 0  # outside references
        # The operations that take it: mostly one, so no list is made for that. Dead ones are swept now and then.
        self.using: Operation | list[Operation] | None = None
        self.uses = 0  # how many of them are alive
        self.pinned = False
        self.ghost: ReferenceType[Any] | None = None  # the evicted payload, while somebody outside holds it

    @property
    def users(self) -> Sequence[Operation]:
        """The operations that take this value, dead ones among them, some more than once."""
        using = self.using
        return using if isinstance(using, list) else () if using is None else (using,)

    def living_users(self) -> Iterator[Operation]:
        """The operations that take this value, each once."""
        return (user for user in dict.fromkeys(self.users) if user.outputs)

    def add_user(self, operation: Operation) -> None:
        self.uses += 1
        using = self.using
        if using is None:
            self.using = operation
        elif isinstance(using, list):
            using.append(operation)
        else:
            self.using = [using, operation]

    def remove_user(self) -> None:
        """Forget one user, already dead; sweeping half of the list at a time makes this O(1) amortised."""
        self.uses -= 1
        if not self.uses:
            self.using = None
        elif isinstance(self.using, list) and len(self.using) > 2 * self.uses + 8:
            self.using = [user for user in self.using if user.outputs]


class Storage:
    """A buffer: `size` bytes in one pool, shared by its `values`. The unit of eviction."""

    __slots__ = (
        "buffer",
        "component",
        "cost",
        "held",
        "last_access",
        "locks",
        "number",
        "pool",
        "resident",
        "size",
        "slot",
        "stake",
        "values",
    )

    def __init__(self, pool: Pool, size: int, buffer: int, number: int, now: float) -> None:
        self.pool = pool
        self.size = size  # bytes
        self.buffer = buffer  # the identity of the memory, while resident; 0: never shared
        self.number = number  # that of its first value
        self.last_access = now  # on the compute clock
        self.cost = 0.0  # seconds: the operations that make the values on it, each once
        self.locks = 0  # operations in flight, pins and sources; a candidate for eviction has none
        self.slot = -1  # where the candidate search keeps it; -1: nowhere; less: it was passed over while locked
        self.resident = True
        self.values: tuple[Value, ...] = ()
        self.component: Component | None = None
        self.stake: tuple[float, float] | None = None  # what the neighbourhood knows of its cost
        self.held: Held | None = None  # evicted, but somebody outside has the buffer

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
            for user in value.users:
                for output in user.outputs:
                    if output is not None and output.storage is not self:
                        yield output.storage


class Operation:
    """One application of a function: how to run it (again), what it takes, what it made and what that cost."""

    __slots__ = (
        "arguments",
        "code",
        "cost",
        "declared",
        "frame",
        "function",
        "instruction",
        "keywords",
        "nout",
        "outputs",
        "positional",
        "room",
        "runs",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        positional: tuple[Any, ...],
        keywords: dict[str, Any] | None,
        arguments: tuple[Value, ...],
        nout: int,
        declared: tuple[int, ...] | None,
        code: CodeType,
        instruction: int,
    ) -> None:
        self.function = function
        self.positional = positional  # with a Value, or a Nest of them, in the place of each Recomputable
        self.keywords = keywords
        self.arguments = arguments  # every value it depends on, found at run time ones included
        self.nout = nout
        self.declared = declared  # bytes of each output, if the caller said
        self.room: Sequence[tuple[str, int]] | None = (
            None  # (device, bytes) that several outputs took, forgotten ones too
        )
        self.code = code  # where it was created
        self.instruction = instruction
        self.outputs: tuple[Value | None, ...] = ()  # None: can never be needed again; empty: nor can the operation
        self.cost = 0.0  # seconds
        self.runs = 0
        self.frame: Frame | None = None  # set while a thread is bringing it back

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def created(self) -> str:
        lines = [line for start, _, line in self.code.co_lines() if line is not None and start <= self.instruction]
        return f"{self.code.co_filename}:{lines[-1] if lines else self.code.co_firstlineno}"

    def __repr__(self) -> str:
        return f"<operation {self.name}, created at {self.created}>"


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


ReleaseMode = Literal["ignore", "eager", "banish"]
