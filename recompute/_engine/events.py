"""Events: what a cache tells its listeners, typed and in order; free without listeners.

Events are delivered in order after the cache's lock is released, so a listener may ask the cache anything. A listener
that raises is dropped with a warning: an observer cannot break a run. Times are on the compute clock (seconds: the sum
of all operation costs so far). Storages are known by number, in order of creation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from recompute._engine.functions import initializer

Reason = Literal["pressure", "release", "request"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened at `time`, and `used` bytes were counted on its device afterwards."""

    time: float
    used: int


@dataclass(frozen=True, slots=True)
class Added(Event):
    """A source: fired when `pure` has made one."""

    storage: int
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True)
class Performed(Event):
    """An operation ran: fired when its outputs are stored. `again`: it was a rematerialization.

    `storages`, each once, with their `nbytes`; `arguments` are storages, too. `results` are the values that can still
    be needed, on the storages `homes`; `inputs` are the values taken.
    """

    function: str
    cost: float
    again: bool
    storages: tuple[int, ...]
    nbytes: tuple[int, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    device: str = "cpu"
    room: int | None = None
    """Bytes that were set aside before the run, because its sizes were known; None: without a budget nothing is."""
    sure: bool = True
    """Whether that size was known, not guessed: the function also runs where what was guessed cannot be set aside."""
    place: str = field(default="", compare=False)
    """Where the operation was created, `file:line`; empty if it is not known."""
    thread: int = field(default=0, compare=False)
    """The identity of the thread that ran it."""


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """A storage was dropped: to make room, because its last reference went, or on request.

    `held`: the program still has what `get` returned, so its bytes stay counted until `LetGo`. `ghosts`: the
    values that could be taken back from there.
    """

    storage: int
    nbytes: int
    why: Reason
    held: bool = False
    ghosts: tuple[int, ...] = ()
    tier: str = ""
    """Where a copy of it lies; empty: it has to be computed again."""


@dataclass(frozen=True, slots=True)
class LetGo(Event):
    """The program has released the evicted storage: its bytes are free."""

    storage: int


@dataclass(frozen=True, slots=True)
class Accessed(Event):
    """`get` returned a value. Not fired inside of a function, where `get` makes an argument of it: see `Performed`."""

    value: int


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The last outside reference to a value has gone."""

    value: int


@dataclass(frozen=True, slots=True)
class Pinned(Event):
    """`pin` brought a value into memory to stay."""

    value: int


@dataclass(frozen=True, slots=True)
class Unpinned(Event):
    """A pinned value may be evicted again."""

    value: int


@dataclass(frozen=True, slots=True)
class Detached(Event):
    """`detach` made a source of a value."""

    value: int


@dataclass(frozen=True, slots=True)
class TakenBack(Event):
    """An evicted storage was still held by the program, and needed no recomputation."""

    storage: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A copy of what is being evicted was written to a tier, in so many seconds: `Evicted` follows."""

    storage: int
    nbytes: int
    tier: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Fetched(Event):
    """An evicted storage was brought back from a tier, in so many seconds, and needed no recomputation."""

    storage: int
    nbytes: int
    tier: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Forgotten(Event):
    """Nothing can ever need the storage again: value and recipe are gone."""

    storage: int


@dataclass(frozen=True, slots=True)
class Foresaw(Event):
    """What is known of the program that repeats has changed: what is done about it now, and why."""

    state: str
    why: str = ""


Listener = Callable[[Event], None]

for _kind in Event.__subclasses__():  # an interrupt while an event is made would lose it
    _kind.__init__ = initializer(_kind.__init__)  # type: ignore[method-assign]  # it sets the same fields
