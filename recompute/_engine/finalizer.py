"""The finalizer: dropped references, and payloads that are destroyed once the lock is free.

Destructors come at any time and in any thread, and those of payloads are the user's own code. So they are never awaited
under the lock: what is dropped there is put aside here, and the end of a Recomputable is only noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from sys import getrefcount
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from recompute import _cython as cython
from recompute._adapters.adapter import kinds
from recompute._engine.events import Evicted, Reason
from recompute._engine.graph import EVICTED, Held, Operation, Reference, Storage, Value, remains_of

if cython.compiled:
    import cython  # read by Cython, and never run
if not cython.compiled:
    new_ref = ref  # compiled, it is the interpreter's, see the .pxd

if TYPE_CHECKING:
    from recompute._engine.changes import Call
    from recompute._engine.device_tiers import Copy
    from recompute._engine.machine import Machine


def _weak(thing: Any) -> ref[Any] | None:
    """A weak reference; None where Python offers none."""
    try:
        return new_ref(thing, None)
    except TypeError:
        return None


def _references(value: Value) -> int:
    payload = value.payload
    references = getrefcount(value.payload)  # not of `payload`: a name may be lent without a reference, from 3.14 on
    del payload
    return references


_EXAMPLE: Final = Value()
_EXAMPLE.payload = object()
_ALONE: Final = _references(_EXAMPLE)
"""References to a payload that only its value holds, as seen where it has a name; compiled, there is one less."""


class HeldReference(ref):  # type: ignore[type-arg]  # as Reference
    """A weak reference to a buffer that the program holds."""

    __slots__ = ("held",)
    held: Held

    @property
    def is_dead(self) -> bool:
        """Whether the buffer is gone: asked without a reference to it, which might be the last one a moment later."""
        return self.__callback__ is None


class Stay:
    """Keeps a storage in memory as long as it lives: the caller holds it, and an interrupt drops it."""

    __slots__ = ("__weakref__",)


class StayReference(ref):  # type: ignore[type-arg]  # as Reference
    """A weak reference to a `Stay`, which knows of what."""

    __slots__ = ("storage",)
    storage: Storage


class Departure:
    """A storage on its way out of memory: its payloads, until their adapters have been told without the lock.

    Its bytes are counted until it is over, since some of them may stay: those that the program holds.
    """

    __slots__ = (
        "buffer",
        "call",
        "copy",
        "following",
        "full",
        "guarded",
        "held",
        "number",
        "owner",
        "payloads",
        "pool",
        "size",
        "storage",
        "taken",
        "told",
        "vacates",
        "watch",
        "watched",
        "weak",
        "why",
    )

    def __init__(self, storage: Storage, watch: bool, copy: Copy | None) -> None:
        self.storage = storage
        self.copy = copy  # to be written before the payloads go
        self.full = False  # the tier has no room for that after all
        self.pool = self.storage.pool
        self.size = self.storage.size
        self.buffer = self.storage.buffer
        self.number = self.storage.number
        self.owner = get_ident()  # the thread that will complete it
        self.call: ref[Call] | None = None  # that completes it just now
        self.vacates = False  # memory lies elsewhere, and the values must not come back before it is given up
        self.guarded: list[Operation] = []  # what makes them meanwhile counts as in flight
        self.why: Reason | None = None  # of its eviction; None: it was forgotten
        self.following: list[Evicted] = []  # later evictions of this thread, of which listeners hear after this one
        self.watch = watch
        self.payloads: list[tuple[Value, Any, bool]] = []
        """Value, payload, and whether the value was referred to: only then its adapter is told."""
        self.taken = False
        self.told = False
        self.watched: ref[Any] | None = None
        self.weak: dict[int, ref[Any] | None] = {}  # number of a value -> its payload here
        self.held: Held | None = None
        self._collect()

    def _collect(self) -> None:
        """Take down which payloads are there."""
        for value in self.storage.values:
            if value.payload is not EVICTED:
                referred = value.references is not None
                self.payloads.append((value, value.payload, referred))
                kind = kinds.get(type(value.payload))
                self.vacates = self.vacates or (referred and kind is not None and kind.vacate is not None)

    @property
    def stays(self) -> bool:
        """Whether it must not leave memory after all: it cannot be made again, and there is no copy."""
        unwritten = self.copy is not None and self.copy.key is None
        return unwritten and any(value.operation is None for value in self.storage.values)

    def take(self) -> None:
        """The values have no payloads any more; again, if an interrupt has cut that short."""
        for value, payload, _ in self.payloads:
            if value.payload is payload:
                value.payload = EVICTED
        self.taken = True

    def tell_adapters(self, note: Callable[[Any], None], settle: Callable[[Any], None]) -> None:
        """What remains of each value, and who holds it. Called without the lock, and again if it was cut short.

        When a buffer goes that is held, `note` gets its reference, which no interrupt can keep from happening; then
        `settle` is called.
        """
        if not self.told:
            for value, payload, referred in self.payloads:
                kind = kinds.of(type(payload))
                if self.watch and kind.watch is not None:
                    if self.watched is None:
                        self.watched = _weak(kind.watch(payload))
                    self.weak[value.number] = _weak(payload)
                if referred and kind.evicted is not None and (value.outlined or not kind.outlines):
                    remains_of(value).outline = kind.evicted(payload)
                if referred and kind.vacate is not None:
                    kind.vacate(payload)
                del payload
            self.told = True
        self.payloads = []  # destroyed here, unless the program holds them
        buffer = None if self.watched is None else self.watched()
        if buffer is not None:
            held = Held(self.pool, self.size, self.number, self.buffer)
            held.payloads = self.weak
            held.settles = ref(buffer, settle)  # called second: the newest reference is told first
            held.reference = HeldReference(buffer, note)
            held.reference.held = held
            self.held = held


class Finalizer:
    """What destructors leave behind, and what is left to them."""

    __slots__ = ("departures", "garbage", "interrupts", "machine", "queue", "stays")

    machine: Machine
    """Set as the engine is made."""

    def __init__(self) -> None:
        self.queue: deque[Reference | HeldReference | StayReference] = deque()
        """References to Recomputables that have gone, to be processed under the lock."""
        self.stays: set[StayReference] = set()
        """Each is one lock of its storage."""
        self.garbage: list[Any] = []
        """What was dropped under the lock."""
        self.departures: dict[Departure, None] = {}
        self.interrupts: deque[tuple[int, BaseException]] = deque()
        """What came while a destructor ran, where nothing can be raised: the thread that it struck raises it when it
        uses the cache next. 0: any thread does."""

    def depart(self, storage: Storage, watch: bool, copy: Copy | None = None) -> Departure | None:
        """Take the payloads off a resident storage. Under the lock, before its bytes are no longer counted.

        `watch`: a payload that the program still holds stays counted. Mostly it does not, which is seen immediately.
        `copy`: to be written first.
        """
        values = storage.values
        if type(values) is tuple and copy is None:
            value = values[0]
            payload = value.payload
            kind = kinds.get(type(payload))  # without an adapter that is asked for the first time
            if kind is not None and (
                kind.silent or value.references is None or (kind.outlines and not value.outlined)
            ):  # no adapter has to be told
                buffer = storage.buffer
                if (
                    not watch
                    or not buffer
                    or kind.watch is None
                    or (buffer == id(payload) and getrefcount(value.payload) == _ALONE)
                ):
                    value.payload = EVICTED
                    if not kind.atomic:
                        self.garbage.append(payload)
                    return None
            del payload
        departure = Departure(storage, watch, copy)
        self.departures[departure] = None  # first: an interrupt must not lose what is in no storage any more
        departure.take()
        self.machine.depart(departure.pool, departure.size)
        return departure

    def destroy_garbage(self) -> None:
        """Without the lock: destructors run."""
        if self.garbage:
            garbage, self.garbage = self.garbage, []
            garbage.clear()

    def note_interrupt(self, interrupt: BaseException) -> None:
        """It struck in a destructor of this thread, where it would be lost: the next use of the cache raises it."""
        self.interrupts.append((get_ident(), interrupt))

    def raise_interrupts(self) -> None:
        """Those that struck this thread: the others are for theirs."""
        for interrupt in tuple(self.interrupts):
            if interrupt[0] in (0, get_ident()):
                try:
                    self.interrupts.remove(interrupt)
                except ValueError:  # another thread raises it
                    continue
                try:
                    raise interrupt[1]
                finally:
                    del (
                        interrupt
                    )  # the frames of its traceback, this one too, would hold it, and what they hold, in a cycle
