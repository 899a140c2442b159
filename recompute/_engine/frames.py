"""Frames: operations in flight, on an explicit stack instead of recursion.

One thread brings back one thing at a time: a stack of frames, with what was asked for at the bottom and the operation
that runs next on top. So a chain of a million evicted values is no deeper than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import local
from typing import TYPE_CHECKING, Any, Final

from recompute._engine.graph import EVICTED, Operation, Storage, Value

if TYPE_CHECKING:
    from recompute._engine.copies import Copy
    from recompute._engine.engine import Engine
    from recompute._engine.meter import Ask
    from recompute._engine.pool import Pool

Order = Callable[[list[Value]], list[Value]]
"""In which evicted arguments are brought back."""


HandleOf = type[Any] | Callable[[Any], type[Any]]
"""The class of what refers to an output, or a function from the payload to that."""


class Frame:
    """One operation that a thread is bringing into memory, with its arguments."""

    __slots__ = (
        "arguments",
        "ask",
        "born",
        "copy",
        "counts",
        "elsewhere",
        "engine",
        "found",
        "handle",
        "handles",
        "key",
        "locked",
        "missing",
        "needs",
        "operation",
        "outer",
        "reserved",
        "retries",
        "rough",
        "running",
        "stack",
        "waiting_below",
    )

    def __init__(self, engine: Engine, operation: Operation | None, stack: list[Frame] | None = None) -> None:
        self.engine = engine
        self.operation = operation  # None: a `Request`
        self.arguments: tuple[Value, ...] = operation.arguments if operation is not None else ()
        self.stack: list[Frame] = [] if stack is None else stack
        self.missing: list[Value] | None = None  # evicted arguments, the next one last; None: not looked at yet
        self.locked: list[Storage] | None = None  # many frames of a deep chain wait without a lock
        self.needs: Sequence[tuple[str, int]] | None = None  # (device, bytes) of the outputs, as far as known
        self.reserved: tuple[tuple[Pool, int], ...] = ()  # room made for the outputs
        self.key: Any = None  # under which the sizes of the outputs are learnt
        self.rough: Any = None  # the same if that is new: what is needed is a guess then
        self.handle: HandleOf = object  # of what refers to the outputs of a first run
        self.handles: list[Any] = []  # what refers to the outputs of a first run
        self.running = False  # the function runs, or its outputs are being stored
        self.copy: Copy | None = None  # what it fetches, if it does not run the operation of a value
        self.counts = False  # among the functions that are executing
        self.born = 0  # values with a higher number were made by the function itself
        self.elsewhere = 0.0  # seconds spent by the function that are not its cost
        self.found: list[Value] | None = None  # values that the function asked for at run time
        self.outer: Frame | None = None  # the running operation that asked for this one
        self.ask: Ask | None = None  # what it cost, if only the device knows, and later
        self.retries: dict[Operation | None, int] | None = None  # how often operations were unlocked again
        self.waiting_below = 0  # of a bottom frame: frames of the stack with a smaller index hold no locks
        self.stack.append(self)  # last: an interrupt must not leave half a frame there

    def lock(self, storage: Storage) -> None:
        """Keep a storage until `unlock`."""
        storage.pool.lock(storage)
        if self.locked is None:
            self.locked = [storage]
        else:
            self.locked.append(storage)

    def lock_arguments(self, now: float, order: Order) -> Value | None:
        """Lock what is resident; the next argument that is not, or None when all are locked."""
        missing = self.missing
        if missing is None:
            missing = self.missing = []
            locked = self.locked = self.locked or []
            for value in self.arguments:
                storage = value.storage
                storage.last_access = now
                if value.payload is EVICTED:
                    missing.append(value)
                else:
                    storage.pool.lock(storage)
                    locked.append(storage)
            if len(missing) > 1:
                missing = self.missing = list(reversed(order(list(dict.fromkeys(missing)))))
        while missing:
            value = missing[-1]
            if value.payload is EVICTED:
                return value
            self.lock(value.storage)
            missing.pop()
        return None

    def unlock(self) -> None:
        """Let go of the arguments; they will be looked at again."""
        locked, self.locked = self.locked, None
        self.missing = None
        for storage in locked or ():
            storage.pool.unlock(storage)

    def give_back(self) -> None:
        """Free what was reserved."""
        reserved, self.reserved = self.reserved, ()
        for pool, size in reserved:
            pool.give_back(size)

    def __repr__(self) -> str:
        return f"<frame of {self.operation or self.arguments}>"


class Request(Frame):
    """The bottom of a stack: one value that is wanted, and what to do with it under the lock once it is resident."""

    __slots__ = ("result", "then")

    def __init__(self, engine: Engine, value: Value, then: Callable[[Value], Any]) -> None:
        super().__init__(engine, None)
        self.arguments = (value,)
        self.then = then
        self.result: Any = None


class _Running(local):
    """Of this thread."""

    frame: Frame | None = None
    """The operation whose function runs here: a `get` inside it is a dependency found at run time."""


running: Final = _Running()


def running_here() -> list[Frame]:
    """The operations whose functions run around this call, the innermost first."""
    frames = []
    frame = running.frame
    while frame is not None:
        if frame.running:  # else an interrupt kept it from saying that it is over
            frames.append(frame)
        frame = frame.outer
    return frames


def in_program_order(values: list[Value]) -> list[Value]:
    """Evicted arguments as the program names them."""
    return values


def by_peak(values: list[Value]) -> list[Value]:
    """Evicted arguments in an order that keeps the peak low: first the one that needs most beyond its own size.

    Sethi and Ullman's rule (The generation of optimal code for arithmetic expressions, 1970), exact on trees, with the
    need estimated on at most `_MOST` evicted operations above each argument.
    """
    return sorted(values, key=_excess, reverse=True)


_MOST: Final = 64


def _excess(value: Value) -> int:
    """An estimate of the bytes that are needed while `value` is brought back, beyond those it then keeps."""
    if value.copy is not None:
        return 0  # it is fetched
    order: list[Operation] = []
    seen: set[Operation] = set()
    stack = [value.operation]
    while stack and len(order) < _MOST:
        operation = stack.pop()
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        order.append(operation)
        stack += [each.operation for each in operation.arguments if each.payload is EVICTED and each.copy is None]
    peak: dict[Operation | None, int] = {}
    for operation in reversed(order):
        missing = [argument for argument in dict.fromkeys(operation.arguments) if argument.payload is EVICTED]
        missing.sort(key=lambda one: peak.get(one.operation, one.storage.size) - one.storage.size, reverse=True)
        kept = most = 0
        for argument in missing:
            most = max(most, kept + peak.get(argument.operation, argument.storage.size))
            kept += argument.storage.size
        made = sum(output.storage.size for output in operation.outputs if output is not None)
        peak[operation] = max(most, kept + made)
    return peak[value.operation] - value.storage.size
