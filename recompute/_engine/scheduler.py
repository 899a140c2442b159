"""Turns: threads that share a cache's memory, who waits, who goes first, and what they let go for each other.

Under the cache's lock, unless a method says otherwise; `_wait` lets it go meanwhile. What a flight had taken is given
back here too, whether it makes way for another or an error ends it.
"""

from __future__ import annotations

from threading import Condition

from recompute._budget import Limits
from recompute._engine.frames import ON_THE_GROUND, Flight, Frame, Room, Running, running
from recompute._engine.graph import Operation, ReleaseMode
from recompute._engine.memory import Pool
from recompute._engine.results import Results
from recompute._policy.formulas import Policy
from recompute._policy.search import Search


class Turns(Results):
    """Lets threads wait for each other, and takes back what they had locked and reserved."""

    def __init__(self, limits: Limits, policy: Policy, search: Search, release: ReleaseMode, verify: bool) -> None:
        super().__init__(limits, policy, search, release, verify)
        self._changed = Condition(self._lock)
        self._leader: Flight | None = None  # goes first, when memory is too short for several
        self._blocked: list[Flight] = []  # threads that wait for memory or for a value

    def _make_way(self, pool: Pool, size: int, flight: Flight, what: Operation | None) -> None:
        """Find room beyond the candidates, or raise BudgetError.

        Memory that is too short for several threads may do for one: the first thread that finds no room leads, and the
        others let go what only waits, until it has arrived. Then locks of its own outer frames give way.
        """
        mine = self._running_mine()
        if (self._executing > mine or self._blocked) and not mine and flight is not ON_THE_GROUND:
            if self._leader is None:
                self._leader = flight
            elif self._leader is not flight:
                self._wait_for_leader(flight)
                return
        if self._executing > mine:
            self._wait(flight)
            return
        stolen = False
        for other in self._blocked:
            stolen = other.let_go() or stolen
        if stolen:
            return
        if any(each.give_way() for each in (flight, *(each.flight for each in running_here()))):
            return
        raise pool.shortage(size, what)

    def _wait_for_leader(self, flight: Flight) -> None:
        """Let another thread go first, with all the memory that this one does not need right now."""
        while len(flight.frames) > 1:  # the leader may need what these were to bring: start over, later
            self._abandon(flight.frames.pop())
        flight.free_below = 0
        flight.let_go()
        while self._leader is not None and self._leader is not flight:
            self._wait(flight)

    def _wait(self, flight: Flight) -> None:
        """Wait until another thread has finished something. Operations around this one do not run meanwhile."""
        mine = self._running_mine()
        self._executing -= mine
        self._blocked.append(flight)
        if not self._executing:
            self._changed.notify_all()  # nobody runs: those who wait for memory must look again
        try:
            self._changed.wait()
        finally:
            self._blocked.remove(flight)
            self._executing += mine

    def _running_mine(self) -> int:
        """How many of the functions that run now are around this call, in its own thread."""
        return sum(each.cache is self for each in running_here())

    def _arrived(self, flight: Flight) -> None:
        """A flight is over, with success or without: if it led, the others may go on. Called without the lock."""
        if self._leader is flight:
            with self._lock:
                self._leader = None
                self._changed.notify_all()
        if self._dropped or self._events:
            self._settle()

    def _abandon(self, frame: Frame) -> None:
        """After a fault: what the frame had taken is given back."""
        if frame.running:
            frame.running = False
            self._executing -= 1
        self._give_back(frame.reserved)
        frame.reserved = ()
        self._unlock(frame)
        if frame.operation is not None and frame.operation.frame is frame:
            frame.operation.frame = None
        if self._blocked:
            self._changed.notify_all()

    def _unlock(self, frame: Frame) -> None:
        """Let the arguments go, and evict those that were released in the meantime."""
        frame.let_go()
        if self._late:
            self._evict_late(frame.arguments)

    def _give_back(self, reserved: Room) -> None:
        for pool, size in reserved:
            pool.used -= size
            pool.fixed -= size


def running_here() -> list[Running]:
    """The operations whose functions run in this thread or task, the innermost first."""
    frames = []
    frame = running.get()
    while frame is not None:
        frames.append(frame)
        frame = frame.outer
    return frames
