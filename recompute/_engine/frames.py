"""Frames: operations in flight, on an explicit stack instead of recursion.

One thread brings back one thing at a time: a stack of frames, with what was asked for at the bottom and the operation
that runs next on top. So a chain of a million evicted values is no deeper than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType

from recompute import _cython as cython
from recompute._engine.graph import EVICTED, Operation, Storage, Value

if cython.compiled:
    import cython  # read by Cython, and never run
if not cython.compiled:
    from threading import get_ident  # compiled, these are the interpreter's, see the .pxd
    from weakref import ref

if TYPE_CHECKING:
    from recompute._engine.changes import Call
    from recompute._engine.device_tiers import Copy
    from recompute._engine.engine import Engine
    from recompute._engine.machine import Machine
    from recompute._engine.meter import Ask
    from recompute._engine.pool import Pool

HandleOf = type[Any] | Callable[[Any], type[Any]]
"""The class of what refers to an output, or a function from the payload to that."""


_NOTHING: Final[list[Value]] = []
"""No arguments; never changed."""


class Frame:
    """One operation that a thread is bringing into memory, with its arguments."""

    __slots__ = (
        "arguments",
        "ask",
        "born",
        "call",
        "copy",
        "counts",
        "elsewhere",
        "engine",
        "found",
        "handle",
        "handles",
        "instead_of",
        "key",
        "locked",
        "machine",
        "missing",
        "needs",
        "operation",
        "outer",
        "reserved",
        "retries",
        "rough",
        "running",
        "stack",
        "thread",
        "waiting_below",
    )

    def __init__(self, engine: Engine, operation: Operation | None, stack: list[Frame] | None = None) -> None:
        self.engine = engine
        self.machine: Machine = engine.machine
        self.operation = operation  # None: a `Request`
        self.arguments: tuple[Value, ...] = () if self.operation is None else self.operation.arguments
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
        self.instead_of: Frame | None = None  # another one of its operation, which this thread cannot wait for
        self.copy: Copy | None = None  # what it fetches, if it does not run the operation of a value
        self.counts = False  # among the functions that are executing
        self.born = 0  # values with a higher number were made by the function itself
        self.elsewhere = 0.0  # seconds spent by the function that are not its cost
        self.found: list[Value] | None = None  # values that the function asked for at run time
        self.outer: Frame | None = None  # the running operation that asked for this one
        self.ask: Ask | None = None  # what it cost, if only the device knows, and later
        self.retries: dict[Operation | None, int] | None = None  # how often operations were unlocked again
        self.waiting_below = 0  # of a bottom frame: frames of the stack with a smaller index hold no locks
        self.call: ReferenceType[Call] | None = None  # of a bottom frame: that brings it
        self.thread = 0  # of that call
        self.stack.append(self)  # last: an interrupt must not leave half a frame there

    def belongs_to(self, call: Call) -> None:
        """This call brings what is wanted; should it be cut short, what it had taken is free."""
        self.call = ref(call, None)
        self.thread = get_ident()

    @property
    def goes_on(self) -> bool:
        """Of a bottom frame: whether the call that brings it goes on, or an interrupt has left this behind."""
        return self.call is not None and self.call() is not None

    @property
    def unlocked(self) -> bool:
        """Of an operation that waits for memory: whether others needed what it had locked. It starts over."""
        return self.missing is None and self.operation is not None and not self.running

    @property
    def is_on(self) -> bool:
        """Whether its function runs now, or its outputs are being stored, in a call that goes on."""
        return self.running and bool(self.stack) and self.stack[0].goes_on

    def lock(self, storage: Storage) -> None:
        """Keep a storage until `unlock`."""
        self.machine.lock(storage)
        if self.locked is None:
            self.locked = [storage]
        else:
            self.locked.append(storage)

    def lock_arguments(self, now: float) -> Value | None:
        """Lock what is resident; the next argument that is not, or None when all are locked."""
        missing = self.missing
        if missing is None:
            machine = self.machine
            missing = self.missing = _NOTHING
            locked = self.locked = self.locked or []
            operation = self.operation
            begins = operation is not None and not operation.runs
            for value in self.arguments:
                storage = value.storage
                storage.last_access = now
                away = value.payload is EVICTED
                if begins and operation is not None and not (away and value.is_gone):
                    value.add_user(operation)  # before it has run: its arguments are not forgotten meanwhile
                if away:
                    if missing is _NOTHING:
                        missing = self.missing = []
                    missing.append(value)
                else:
                    machine.lock(storage)
                    locked.append(storage)
            if len(missing) > 1:
                missing = self.missing = list(reversed(by_peak(list(dict.fromkeys(missing)))))
        while missing:
            value = missing[-1]
            if value.payload is EVICTED:
                return value
            self.lock(value.storage)
            missing.pop()
        return None

    def unlock(self) -> None:
        """Unlock the arguments; they will be looked at again."""
        locked, self.locked = self.locked, None
        self.missing = None
        machine = self.machine
        for storage in locked or ():
            machine.unlock(storage)

    def give_back(self) -> None:
        """Free what was reserved."""
        reserved, self.reserved = self.reserved, ()
        for pool, size in reserved:
            self.machine.give_back(pool, size)

    def __repr__(self) -> str:
        return f"<frame of {self.operation or self.arguments}>"


class Request(Frame):
    """The bottom of a stack: one value that is wanted, and what to do with it under the lock once it is resident."""

    __slots__ = ("result", "then")

    def __init__(self, engine: Engine, value: Value, then: Callable[[Engine, Value], Any]) -> None:
        super().__init__(engine, None)
        self.arguments = (value,)
        self.then = then
        self.result: Any = None


class Here:
    """What runs in one thread."""

    __slots__ = ("frame", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.frame: Frame | None = None
        """The operation whose function runs, the innermost one."""

    def innermost(self) -> Frame | None:
        """The same, as it is after interrupts, which may have kept operations from saying that they are over."""
        frame = self.frame
        while frame is not None and not frame.is_on:
            frame = self.frame = frame.outer
        return frame


class Running:
    """The operations whose functions run now: a `get` inside one is a dependency found at run time."""

    __slots__ = ("_newest", "_threads")

    def __init__(self) -> None:
        self._newest: Here | None = None
        """That was asked for last."""
        self._threads: dict[int, Here] = {}
        """By a dict, which compiled code reads faster than a `local`; the system uses identities of threads again."""

    def here(self) -> Here:
        """Of this thread."""
        here = self._newest
        if here is None or here.thread != get_ident():
            here = self._threads.get(get_ident())
            if here is None:
                here = self._threads[get_ident()] = Here()
            self._newest = here
        return here

    def frame(self) -> Frame | None:
        """The innermost operation that runs in this thread."""
        return self.here().innermost()

    def after_fork(self) -> None:
        """In a child process: the other threads are not here."""
        mine = self.here()
        self._threads.clear()
        self._threads[get_ident()] = mine


running: Final = Running()


def running_here() -> list[Frame]:
    """The operations whose functions run around this call, the innermost first."""
    frames = []
    frame = running.frame()
    while frame is not None:
        if frame.is_on:
            frames.append(frame)
        frame = frame.outer
    return frames


def by_peak(values: list[Value]) -> list[Value]:
    """Evicted arguments in an order that keeps the peak low: first the one that needs most beyond its own size.

    Sethi and Ullman's rule (The generation of optimal code for arithmetic expressions, 1970), exact on trees, with the
    need estimated on at most `_MOST` evicted operations above each argument.
    """
    return sorted(values, key=_excess, reverse=True)


_MOST: Final = 64


def _excess(value: Value) -> int:
    """An estimate of the bytes that are needed while `value` is brought back, beyond those it then keeps."""
    if value.copy is not None or value.operation is None:
        return 0  # it is fetched, or gone
    order: list[Operation] = []
    seen: set[Operation] = set()
    stack: list[Operation | None] = [value.operation]
    while stack and len(order) < _MOST:
        operation = stack.pop()
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        order.append(operation)
        stack += [
            argument.operation
            for argument in operation.arguments
            if argument.payload is EVICTED and argument.copy is None
        ]
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
