"""The meter: the compute clock, and what each run of an operation costs.

The seconds that a function spends in the cache, for operations of its own or for values that it asks for, are billed to
those and not to it. What runs on a device is billed when the device tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import fsum, inf
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from recompute._engine.graph import Operation

Ask = Callable[[], float | None]
"""Gives the seconds that a run took on its device, once they are known; None before."""

Timer = Callable[[str], Callable[[], Ask] | None]
"""`Adapter.timer`: of a device whose work goes on after a function has returned."""


_WARM: Final = 8
"""The first turn of the library that is measured: before it much is found out that is known from then on."""

_FIRST: Final = 64
"""Up to this turn all are measured."""

_EVERY: Final = 64
"""After it one of so many is, at no fixed distance, since programs repeat."""

_MOST: Final = 4096
"""Functions whose repeated runs are counted: of more the half that took longest."""


class Meter:
    """Seconds, by the clock that the cache was given."""

    __slots__ = (
        "clock",
        "library_time",
        "measured",
        "moving_time",
        "next",
        "now",
        "remat_time",
        "repeated",
        "timers",
        "turns",
        "unknown",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.now = 0.0
        """The compute clock: the costs of all runs so far."""
        self.remat_time = 0.0
        """Of these, the costs of repeated runs."""
        self.moving_time = 0.0
        """Seconds in which bytes were moved to tiers and back: not on the compute clock."""
        self.library_time = 0.0
        """Seconds of the library itself, estimated: each measured turn stands for those since the one before."""
        self.turns = 0
        """How often the library was at work: for a run of an operation, or to settle what had come up."""
        self.measured = 0
        """The last one of which it is known how long it took."""
        self.next = _WARM
        """The next one to be measured."""
        self.repeated: dict[CodeType | str, list[float]] = {}
        """Function -> [times it ran again, seconds that took]."""
        self.timers: dict[str, Timer] = {}
        """By device."""
        self.unknown: deque[tuple[Operation, float, bool, Ask]] = deque()
        """Operation, seconds it took to launch it, whether that was again, and how to ask for what it took."""

    def read(self) -> float:
        """What the clock says. Raises TypeError, which names it, for what is no number. Without the lock."""
        reading: Any = self.clock()
        if type(reading) is float:
            return reading
        try:
            return fsum((reading,))  # not float(): that takes text, too
        except OverflowError:  # an integer
            return inf
        except TypeError:
            raise TypeError(
                f"the clock {self.clock!r} returned {reading!r}, which is no number of seconds; a clock returns finite "
                "seconds, as time.perf_counter does"
            ) from None

    def checked(self, seconds: float) -> float:
        """The seconds between two readings of the clock. Raises ValueError if the clock is broken."""
        if 0.0 <= seconds < inf:
            return seconds
        if -inf < seconds < 0.0:
            return 0.0  # a clock that was set back
        raise ValueError(
            f"the clock {self.clock!r} gave readings that differ by {seconds} seconds; a clock returns finite seconds"
        )

    def turn_begins(self) -> float:
        """The clock as the library begins to work, if this turn is measured; else infinity."""
        self.turns += 1
        return self._reading() if self.turns >= self.next else inf

    def turn_ends(self, began: float, spent: float) -> None:
        """It has worked, of which functions took `spent` seconds. Any thread may say so."""
        if began == inf:
            return
        turns, time = self.turns, self._reading() - began - spent
        if 0.0 < time < inf:
            self.library_time += time * max(1, turns - self.measured)
        self.measured = turns
        self.next = turns + (1 if turns < _FIRST else 1 + turns * 2654435761 % 4294967296 % (2 * _EVERY - 1))

    def _reading(self) -> float:
        """The clock, without what was moved: what lies between two readings, less the functions, is the library's."""
        return self.read() - self.moving_time

    def bill(self, cost: float, again: bool) -> None:
        self.now += cost
        if again:
            self.remat_time += cost

    def count_repeated(self, function: CodeType | str, cost: float) -> None:
        count = self.repeated.get(function)
        if count is None:
            if len(self.repeated) >= _MOST:  # functions that are made anew each time
                dearest = sorted(self.repeated.items(), key=_seconds_of, reverse=True)
                self.repeated = dict(dearest[: _MOST // 2])
            count = self.repeated[function] = [0, 0.0]
        count[0] += 1
        count[1] += cost

    def start_timer(self, operation: Operation) -> Callable[[], Ask] | None:
        """Time an operation on the first device of its arguments that has a timer. Without the lock."""
        for argument in operation.arguments:
            device = argument.storage.pool.device
            timer = self.timers.get(device)
            if timer is not None:
                return timer(device)
        return None

    def after_fork(self) -> None:
        """In a child process: it can neither ask a device of its parent's for times, nor give back what that has."""
        _of_parents.append(self.unknown)
        self.unknown = deque()

    def answers(self) -> list[tuple[Operation, float, bool, float]]:
        """(operation, seconds to launch it, whether again, seconds it took) of what devices know by now.

        Without the lock: it asks adapters.
        """
        known: list[tuple[Operation, float, bool, float]] = []
        while self.unknown:
            entry = self.unknown[0]
            operation, launched, again, ask = entry
            seconds = ask()
            if seconds is None:
                break
            try:
                self.unknown.remove(entry)
            except ValueError:  # another thread was faster
                continue
            known.append((operation, launched, again, self.checked(seconds)))
        return known


_of_parents: Final[list[object]] = []
"""What nothing may be done with but to keep it."""


def _seconds_of(repeated: tuple[CodeType | str, list[float]]) -> float:
    """What repeated runs of a function took."""
    return repeated[1][1]


def checked_clock(clock: Any) -> Callable[[], float]:
    """The clock itself. Raises TypeError if it cannot be one."""
    if not callable(clock):
        raise TypeError(f"clock must be a function that returns seconds, not {clock!r}")
    return clock  # type: ignore[no-any-return]  # a callable of unknown result
