"""Operations in flight: the frames that take the place of recursion, and what a running function found at run time."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from recompute._engine.graph import EVICTED, Operation, Storage, Value

if TYPE_CHECKING:
    from recompute._engine.engine import Engine
    from recompute._engine.memory import Pool


Made = tuple[Any, int, int, str, bytes | None]
"""One output of a run: payload, bytes, identity of its memory (0: never shared), device, digest if it is verified."""


Room = tuple[tuple["Pool", int], ...]
"""Bytes reserved for outputs, by pool."""


class Running:
    """An operation whose function runs now, as a `get` inside that function sees it."""

    __slots__ = ("born", "cache", "flight", "found", "nested", "outer")

    def __init__(self, cache: Engine, flight: Flight, born: int) -> None:
        self.cache = cache
        self.flight = flight
        self.born = born  # storages with a higher number were made by the function itself
        self.outer: Running | None = None  # the running operation that asked for this one
        self.nested = 0.0  # seconds spent in the cache by the function: not its cost
        self.found: list[Value] | None = None  # values that the function asked for at run time


class Frame(Running):
    """One operation that a thread is bringing into memory, with its arguments."""

    __slots__ = ("arguments", "ask", "key", "locked", "operation", "reserved", "running", "todo")

    def __init__(self, cache: Engine, operation: Operation | None, flight: Flight) -> None:
        self.cache, self.flight, self.born, self.outer, self.nested, self.found = cache, flight, 0, None, 0.0, None
        self.operation = operation  # None: a Goal
        self.arguments = operation.arguments if operation is not None else ()
        self.todo: list[Value] | None = None  # evicted arguments, the next one last; None: not looked at yet
        self.locked: list[Storage] | None = None  # many frames of a deep chain wait without a lock
        self.reserved: Room = ()  # room made for the outputs
        self.key: Any = None  # under which the sizes of the outputs are learnt
        self.running = False  # the function runs, outside the lock
        self.ask: Callable[[], float | None] | None = None  # what it cost, if only the device knows, and later

    def lock_arguments(self, now: float) -> Value | None:
        """Lock what is resident; the next argument that is not, or None when all are locked."""
        todo = self.todo
        if todo is None:
            todo = self.todo = []
            for value in self.arguments:
                storage = value.storage
                storage.last_access = now
                if value.payload is EVICTED:
                    todo.append(value)
                else:
                    self.lock(storage)
            if len(todo) > 1:
                todo = self.todo = list(reversed(self.cache._order(list(dict.fromkeys(todo)))))
        while todo:
            value = todo[-1]
            if value.payload is EVICTED:
                return value
            self.lock(value.storage)
            todo.pop()
        return None

    def lock(self, storage: Storage) -> None:
        """Keep a storage until `let_go`."""
        storage.pool.lock(storage)
        if self.locked is None:
            self.locked = [storage]
        else:
            self.locked.append(storage)

    def let_go(self) -> None:
        """Unlock everything; the arguments will be looked at again."""
        locked, self.locked = self.locked, None
        self.todo = None
        for storage in locked or ():
            storage.pool.unlock(storage)

    def __repr__(self) -> str:
        return f"<frame of {self.operation or self.arguments}>"


class Goal(Frame):
    """The bottom of a flight: one value that is wanted, and what to do with it under the lock once it is resident."""

    __slots__ = ("arrive", "result")

    def __init__(self, cache: Engine, value: Value, arrive: Callable[[Value], Any]) -> None:
        super().__init__(cache, None, Flight())
        self.arguments = (value,)
        self.arrive = arrive
        self.result: Any = None


class Flight:
    """What one thread is bringing back: a stack of frames, the wanted one at the bottom, the next one to run on top."""

    __slots__ = ("frames", "free_below", "given_way")

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.free_below = 0  # frames with a smaller index hold no locks
        self.given_way: dict[Operation | None, int] = {}  # how often an operation's locks were let go

    def pop(self) -> None:
        self.frames.pop()
        self.free_below = min(self.free_below, max(0, len(self.frames) - 1))

    def let_go(self) -> bool:
        """Unlock whatever only waits; False if there was nothing."""
        had = False
        for frame in self.frames[self.free_below :]:
            if frame.locked and not frame.running:
                frame.let_go()
                had = True
        return had

    def give_way(self) -> bool:
        """Let go the outermost locks that wait for the frame on top; False if there are none, or progress ends.

        An operation of k arguments gives way at most k + 1 times: each time another argument is brought first, so
        every order that could help has had its turn.
        """
        top = len(self.frames) - 1
        while self.free_below < top:
            frame = self.frames[self.free_below]
            times = self.given_way.get(frame.operation, 0)
            if frame.locked and times <= len(frame.arguments):
                self.given_way[frame.operation] = times + 1
                frame.let_go()
                return True
            self.free_below += 1
        return False


ON_THE_GROUND: Final = Flight()
"""The flight of an operation that needed none: always empty."""


def by_peak(values: list[Value]) -> list[Value]:
    """Evicted arguments in an order that keeps the peak low: first the one that needs most beyond its own size.

    Sethi and Ullman's rule (The generation of optimal code for arithmetic expressions, 1970), exact on trees, with the
    need estimated on at most `_LOOK` evicted operations above each argument.
    """
    return sorted(values, key=_excess, reverse=True)


_LOOK: Final = 64


def _excess(value: Value) -> int:
    """An estimate of the bytes that are needed while `value` is brought back, beyond those it then keeps."""
    order: list[Operation] = []
    seen: set[Operation] = set()
    stack = [value.operation]
    while stack and len(order) < _LOOK:
        operation = stack.pop()
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        order.append(operation)
        stack.extend(each.operation for each in operation.arguments if each.payload is EVICTED)
    peak: dict[Operation | None, int] = {}
    for operation in reversed(order):
        missing = [each for each in dict.fromkeys(operation.arguments) if each.payload is EVICTED]
        missing.sort(key=lambda each: peak.get(each.operation, each.storage.size) - each.storage.size, reverse=True)
        kept = most = 0
        for each in missing:
            most = max(most, kept + peak.get(each.operation, each.storage.size))
            kept += each.storage.size
        made = sum(each.storage.size for each in operation.outputs if each is not None)
        peak[operation] = max(most, kept + made)
    return peak[value.operation] - value.storage.size


running: Final[ContextVar[Running | None]] = ContextVar("recompute_running", default=None)
"""The operation whose function runs in this context: a `get` inside it is a dependency found at run time."""
