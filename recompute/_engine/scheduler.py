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
        self.blocked: list[Frame] = []
        """The bottom frames of threads that wait for memory or for a value."""
        self.executing = 0
        """Functions that run now, outside of the lock, in threads that do not wait."""

    def mine(self, engine: object) -> int:
        """How many of the functions that run now are around this call, in its own thread."""
        return sum(frame.engine is engine for frame in running_here())

    def wait(self, bottom: Frame) -> None:
        """Wait until another thread has finished something. Operations around this one do not run meanwhile.

        Not for what an interrupt has left behind: that is cleared away at once.
        """
        if bottom.engine.left_behind():
            return
        mine = self.mine(bottom.engine)
        self.executing -= mine
        self.blocked.append(bottom)
        if not self.executing:
            self.notify()  # nothing runs: those who wait for memory must look again
        try:
            self._changes.pause(partial(turns.lend_first, self.changed))
        finally:
            self.blocked.remove(bottom)
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
        mine = self.mine(engine)
        if (self.executing > mine or self.blocked) and not mine and stack:
            if self.leader is None:
                self.leader = stack[0]
            elif self.leader is not stack[0]:
                self.let_leader_go_first(engine, stack)
                return True
        if self.executing > mine or pool.departing or self.others_go_on():
            self.wait(frame.stack[0])
            return True
        unlocked = False
        for blocked in self.blocked:
            unlocked = self.unlock_waiting(blocked.stack) or unlocked
        if unlocked:
            return True
        stacks = [stack, *(outer.stack for outer in running_here() if outer.engine is engine)]
        return any(self.unlock_outermost(one) for one in stacks) or engine.left_behind()

    def others_go_on(self) -> bool:
        """Whether another thread is at a request and does not wait: it will free what it has taken, or wait, too."""
        waiting = {get_ident(), *[bottom.thread for bottom in self.blocked]}
        stacks = list(self.stacks)  # which grows without the lock
        return any(bottom.stack and bottom.goes_on and bottom.thread not in waiting for bottom in stacks)

    def let_leader_go_first(self, engine: Engine, stack: list[Frame]) -> None:
        """Let another thread go first, with all the memory that this one does not need right now."""
        while len(stack) > 1:  # the leader may need what these were to bring: start over, later
            engine.leave(stack[-1])
        stack[0].waiting_below = 0
        self.unlock_waiting(stack)
        while self.leader is not None and self.leader is not stack[0]:
            self.wait(stack[0])

    def waits_for_itself(self, busy: Frame, stack: list[Frame]) -> bool:
        if busy.operation is None:  # its value is on the way out of memory
            return bool(busy.key.owner == get_ident())
        return busy.stack is stack or any(busy.stack is outer.stack for outer in running_here())

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
