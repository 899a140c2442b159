"""The scheduler: the lock, threads that share a cache's memory, who waits for whom, and who goes first."""

from __future__ import annotations

import sys
from threading import Condition, RLock
from types import CodeType, FrameType

from recompute._engine.frames import Frame, running_here
from recompute._engine.graph import Operation


class Scheduler:
    """Lets threads wait for each other. Under the lock, unless a method says otherwise."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.changed = Condition(self.lock)
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
        """Wait until another thread has finished something. Operations around this one do not run meanwhile."""
        mine = self.mine(bottom.engine)
        self.executing -= mine
        self.blocked.append(bottom)
        if not self.executing:
            self.changed.notify_all()  # nobody runs: those who wait for memory must look again
        try:
            self.changed.wait()
        finally:
            self.blocked.remove(bottom)
            self.executing += mine

    def notify(self) -> None:
        """Something has changed for those who wait."""
        if self.blocked:
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

    def pop(self, stack: list[Frame]) -> None:
        stack.pop()
        if stack:
            stack[0].waiting_below = min(stack[0].waiting_below, len(stack) - 1)

    def after_fork(self) -> None:
        """In a child process: another thread may have held the lock, and is not here."""
        self.lock = RLock()
        self.changed = Condition(self.lock)
        self.blocked.clear()


def frames_on_stacks(codes: tuple[CodeType, ...]) -> list[FrameType]:
    """The calls of some functions that are going on now, in all threads."""
    found = []
    frame: FrameType | None
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            if frame.f_code in codes:
                found.append(frame)
            frame = frame.f_back
    frame = None  # one of them was this very call: it would keep all that its callers hold
    return found
