"""The scheduler: the lock, threads that share a cache's memory, who waits for whom, and who goes first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Condition, get_ident
from typing import TYPE_CHECKING

from recompute._engine.changes import Changes
from recompute._engine.frames import Frame, running_here
from recompute._engine.graph import Operation
from recompute._engine.randomness import turns

if TYPE_CHECKING:
    from recompute._engine.engine import Engine
    from recompute._engine.pool import Pool


class Scheduler:
    """Lets threads wait for each other. Under the lock, unless a method says otherwise."""

    __slots__ = ("_changes", "blocked", "changed", "executing", "in_flight", "leader", "stacks")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.changed = Condition(changes.lock)
        self.in_flight: dict[Operation, Frame] = {}
        """Evicted operations that a thread is bringing back: others that need them wait."""
        self.stacks: dict[Frame, None] = {}
        """The bottom frames of all stacks."""
        self.leader: Frame | None = None
        """The bottom frame of the stack that goes first, when memory is too short for several."""
        self.blocked: dict[Frame, Operation | None] = {}
        """The bottom frames of threads that wait, and what for: an operation in flight, or memory."""
        self.executing = 0
        """Functions that run now, outside of the lock, in threads that do not wait."""

    def mine(self) -> int:
        """How many of the functions that run now are around this call, in its own thread."""
        return sum(stack[-1].counts for stack in self.around())

    def wait(self, bottom: Frame, operation: Operation | None = None) -> None:
        """Wait until another thread has finished something. Operations around this one do not run meanwhile.

        Not for what an interrupt has left behind: that is cleared away at once. `operation`: needed; None: memory is.
        """
        if bottom.engine.left_behind():
            return
        mine = self.mine()
        self.executing -= mine
        self.blocked[bottom] = operation
        if not self.executing:
            self.notify()  # nothing runs: those who wait for memory must look again
        try:
            self._changes.pause(partial(turns.lend_first, self.changed))
        finally:
            del self.blocked[bottom]
            self.executing += mine

    def notify(self) -> None:
        """Something has changed for those who wait."""
        if self.blocked:
            self._changes.calls_python()
            self.changed.notify_all()

    def unlock_waiting(self, stack: list[Frame]) -> bool:
        """Unlock whatever only waits on a stack; False if there was nothing."""
        had = False
        for frame in stack[stack[0].waiting_below :] if stack else ():
            if frame.locked and not frame.running:
                frame.unlock()
                had = True
        return had

    def unlock_outermost(self, stack: list[Frame]) -> bool:
        """Unlock the outermost frame that waits for the one on top; False if there is none, or progress ends.

        An operation of k arguments is unlocked at most k + 1 times: each time another argument is brought first, so
        every order that could help has had its turn.
        """
        if not stack:
            return False
        bottom, top = stack[0], len(stack) - 1
        if bottom.retries is None:
            bottom.retries = {}
        while bottom.waiting_below < top:
            frame = stack[bottom.waiting_below]
            times = bottom.retries.get(frame.operation, 0)
            if frame.locked and times <= len(frame.arguments):
                bottom.retries[frame.operation] = times + 1
                frame.unlock()
                return True
            bottom.waiting_below += 1
        return False

    def find_room(self, engine: Engine, pool: Pool, frame: Frame) -> bool:
        """Find room beyond the candidates; False if there is none.

        Memory that is too short for several threads may do for one: the first thread that finds no room leads, and the
        others unlock what only waits, until it has got what it asked for. Then its own outer frames are unlocked.
        """
        stack: list[Frame] = [] if frame.running or frame.operation is None else frame.stack
        mine = self.mine()
        around = self.around(stack)
        if (self.executing > mine or self.blocked) and not around and stack:
            if self.leader is None:
                self.leader = stack[0]
            elif self.leader is not stack[0]:
                self.let_leader_go_first(engine, stack)
                return True
        waiting = {get_ident(), *[bottom.thread for bottom in self.blocked]}
        if self.executing > mine or self.others_go_on(waiting) or self.others_free(engine, pool, waiting):
            self.wait(frame.stack[0])
            return True
        unlocked = False
        for bottom in tuple(self.stacks):
            if bottom.thread != get_ident() and bottom.thread in waiting:
                unlocked = self.unlock_waiting(bottom.stack) or unlocked
        if unlocked:
            return True
        return any(self.unlock_outermost(one) for one in (stack, *around)) or engine.left_behind()

    def others_go_on(self, waiting: set[int]) -> bool:
        """Whether another thread is at a request and does not wait: it will free what it has taken, or wait, too."""
        stacks = list(self.stacks)  # which grows without the lock
        return any(bottom.stack and bottom.goes_on and bottom.thread not in waiting for bottom in stacks)

    @staticmethod
    def others_free(engine: Engine, pool: Pool, waiting: set[int]) -> bool:
        """Whether another thread is about to free bytes, and does not wait."""
        departures = engine.finalizer.departures if pool.departing else ()
        return any(departure.pool is pool and departure.owner not in waiting for departure in departures)

    def let_leader_go_first(self, engine: Engine, stack: list[Frame]) -> None:
        """Let another thread go first, with all the memory that this one does not need right now."""
        while len(stack) > 1:  # the leader may need what these were to bring: start over, later
            engine.leave(stack[-1])
        stack[0].waiting_below = 0
        self.unlock_waiting(stack)
        while self.leader is not None and self.leader is not stack[0]:
            self.wait(stack[0])

    def around(self, stack: list[Frame] | None = None) -> list[list[Frame]]:
        """The stacks of this thread, but for this one, that go on when it is over; the innermost first.

        Theirs is the function that runs around this call, or the adapter or destructor that is called between two.
        """
        mine = get_ident()
        bottoms = [bottom for bottom in tuple(self.stacks) if bottom.thread == mine and bottom.goes_on]
        return [bottom.stack for bottom in reversed(bottoms) if bottom.stack and bottom.stack is not stack]

    def yields(self, bottom: Frame) -> bool:
        """Whether another stack goes first. None inside of another one does: the leader may wait for that."""
        return self.leader is not bottom and not self.around(bottom.stack)

    def comes_back_here(self, busy: Frame) -> bool:
        """Whether who waits for this frame waits for itself: this thread has it, or one that waits for this thread.

        So it is where code of the user's uses the cache while an operation around it is not over yet.
        """
        mine = get_ident()
        for _ in range(len(self.blocked) + 1):
            if busy.operation is None:  # its value is on the way out of memory
                thread = busy.key.owner
            elif busy.stack[0].goes_on:
                thread = busy.stack[0].thread
            else:
                return False
            if thread == mine:
                return True
            needed = [operation for bottom, operation in self.blocked.items() if bottom.thread == thread]
            following = self.in_flight.get(needed[-1]) if needed and needed[-1] is not None else None
            if following is None:
                return False
            busy = following
        return False

    @staticmethod
    def needs_itself(busy: Frame, stack: list[Frame]) -> bool:
        """Whether what comes back here is needed for itself, or is on its way out of memory: no other run helps."""
        return (
            busy.operation is None or busy.stack is stack or any(busy.stack is outer.stack for outer in running_here())
        )

    def over(self, bottom: Frame) -> None:
        """A request is over."""
        self.stacks.pop(bottom, None)
        if self.leader is bottom:
            self._lead_no_more()

    def _lead_no_more(self) -> None:
        with self._changes.lock:
            self.leader = None
            self.changed.notify_all()

    def after_fork(self) -> None:
        """In a child process: another thread may have held the lock, and is not here."""
        self.changed = Condition(self._changes.lock)
        self.blocked.clear()


class LateError(RuntimeError):
    """Raised under the lock; its words, which name a function of the user's, are found when it is read."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self._words = words

    def __str__(self) -> str:
        return self._words()


def needs_itself(operation: Operation) -> LateError:
    """An operation that cannot run before it has run."""
    return LateError(partial(_needs_itself, operation))


def gone(operation: Operation | None) -> LateError:
    """A value without a recipe is not in memory: an argument of the operation, or (None) what was asked for itself."""
    return LateError(partial(_gone, operation))


def _needs_itself(operation: Operation) -> str:
    return f"{operation} needs its own result: it gets a value that is made from it"


def _gone(operation: Operation | None) -> str:
    what = "a value" if operation is None else f"an argument of {operation.name}"
    return (
        f"{what} is gone: another thread has changed the array in place; let threads that change one array take turns, "
        "with a lock"
    )
