"""Blocks as threads enter and leave them, and as optimizers make steps in them: what both paths have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Thread, local
from time import perf_counter
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, Self
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recompute.extend import Counts, RLock
from recompute_torch._report import Report, Step
from recompute_torch._threads import Interrupts, Surroundings, starting

current: Final = local()

CURE: Final = (
    "Raise the budget, or take smaller batches; print(block) shows what holds memory and what is repeated, and "
    "rt.least(step) what each budget costs."
)

ENTERED_ONCE: Final = "a budget block is entered once; make a new one: with rt.budget(...):"

OTHERS: Final = (
    "a tensor belongs to another budget block that is still open; let all threads that share tensors enter one block: "
    "with block: ..."
)

_MAX_STEPS: Final = 1000
"""That are remembered."""

blocks: Final[WeakSet[Block]] = WeakSet()
"""Those that are open, for processes that are forked off: the workers of a DataLoader."""


_choosing: Final[Any] = RLock()
"""One block at a time opens or closes."""


def open_blocks() -> list[Block]:
    """Those that are open, whatever other threads open meanwhile."""
    while True:
        try:
            return list(blocks)
        except RecursionError:
            raise
        except RuntimeError:  # another thread has just opened one
            continue


def _joining() -> list[Callable[[], Callable[[], object]]]:
    """What a thread does first that this one starts: it takes part where this one does."""
    return [block._join for block in open_blocks() if block._is_here()]


_threads: Final = Surroundings((Thread, ("start",), partial(starting, _joining)))


def _before_a_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for block in open_blocks():
        if block._is_here():  # optimizers of threads that take no part are of no interest
            block._steps_now(optimizer)


def _after_it(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for block in open_blocks():
        if block._is_here():
            block._stepped(optimizer)


_HOOKS: Final[list[tuple[Any, Any]]] = [
    (register_optimizer_step_pre_hook, _before_a_step),
    (register_optimizer_step_post_hook, _after_it),
]


_hooked: Final[list[Any]] = []


def _watch_optimizers() -> None:
    """Tell the blocks of a thread of the steps of its optimizers, as long as any block is open.

    Another thread may be in the middle of a step, and of torch's hooks, which must not change with each block.
    """
    for register, hook in _HOOKS[len(_hooked) :] if blocks else ():
        _hooked.append(register(hook))
    while _hooked and not blocks:
        _hooked.pop().remove()


def _forked() -> None:
    for block in open_blocks():
        block._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
    os.register_at_fork(after_in_child=_choosing._at_fork_reinit)  # another thread may have had it


class Block(ABC):
    """Entered by any number of threads, and left when the last one leaves; threads that these start take part.

    A round ends with a step of the first optimizer.
    """

    path: ClassVar[Literal["python", "native"]]
    """Which one tracks the operators: a dispatch mode, or C++ below it."""
    _lap: tuple[int, float, Counts]
    """Steps so far, when the last of them ended, and what had been done by then."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Step], Any]] = []
        self._steps: deque[Step] = deque(maxlen=_MAX_STEPS)
        self._interrupts = Interrupts()
        self._here = local()
        self._times_entered = 0
        self._hooks: list[Any] = []
        self._optimizer: ref[torch.optim.Optimizer] | None = None
        self._lock = RLock()

    # Entering and leaving

    def __enter__(self) -> Self:
        around: list[Block] = getattr(current, "blocks", [])
        if any(block is not self for block in around):
            raise RuntimeError(
                "a budget block is open in this thread already, and tensors can belong to one only; "
                "to change its budget, set block.budget"
            )
        if not around:  # it may have been started in another block, which it leaves for a while
            self._here.others = [block for block in open_blocks() if block is not self and block._step_aside()]
        first = False
        try:
            with self._lock:
                first = not self._times_entered
                if first:
                    self._open()
                    self._lap = 0, perf_counter(), self._counts()
                    with _choosing:
                        blocks.add(self)
                        _threads.open()
                        _watch_optimizers()
                self._times_entered += 1
                self._begin()
            current.blocks = [*around, self]
        except BaseException:
            current.blocks = around
            if first:
                self._take_back()
            self._let_others_go_on()
            raise
        return self

    def _take_back(self) -> None:
        """An interrupt came as the first thread entered: nobody is in."""
        with self._lock:
            self._times_entered = 0
            if self._is_here():
                self._here.times = 0
                self._step_out()
            if self in blocks:
                self._wind_up()

    def _step_aside(self) -> bool:
        """This thread takes part no longer, until `_go_on`; False: it does not anyway."""
        here = self._here
        if not self._is_here():
            return False
        here.aside, here.times = here.times, 0
        self._step_out()
        return True

    def _go_on(self) -> None:
        here = self._here
        if self in blocks:
            here.times = here.aside
            self._take_part()

    def _let_others_go_on(self) -> None:
        if not getattr(current, "blocks", None):
            others, self._here.others = self._here.others, []
            for block in others:
                block._go_on()

    def _join(self) -> Callable[[], object]:
        """A thread has been started. What it does last: a mode that goes with a thread asks for the interpreter."""
        with self._lock:
            if self._times_entered:
                self._begin()
        return self._step_aside

    def _is_here(self) -> bool:
        """Whether this thread takes part."""
        return getattr(self._here, "times", 0) > 0

    def _begin(self) -> None:
        """This thread takes part, as long as it has not ended as often as it has begun."""
        here = self._here
        here.times = getattr(here, "times", 0) + 1
        if here.times == 1:
            self._take_part()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.blocks = current.blocks[:-1]
        with self._lock:
            self._here.times -= 1
            if not self._here.times:
                self._step_out()
            self._times_entered -= 1
            try:
                if not self._times_entered:
                    self._wind_up()
            finally:
                if not self._here.times:
                    self._interrupts.release()
                self._let_others_go_on()
                self._interrupts.deliver()

    def _wind_up(self) -> None:
        """The last thread leaves."""
        try:
            self._close()
        finally:
            for hook in self._hooks:
                hook.remove()
            with _choosing:
                if self in blocks:  # else an interrupt came as it was entered
                    _threads.close()
                    blocks.discard(self)
                    _watch_optimizers()

    @abstractmethod
    def _open(self) -> None:
        """The first thread enters. Raises RuntimeError if the block cannot be opened."""

    @abstractmethod
    def _close(self) -> None:
        """The last thread has left."""

    @abstractmethod
    def _take_part(self) -> None:
        """Operators of this thread are tracked."""

    @abstractmethod
    def _step_out(self) -> None:
        """And no longer."""

    def _met_storages(self) -> list[Any]:
        """Of the program, with a Python object, that belong to this block; the native tracker knows its own."""
        return []

    def _after_fork(self) -> None:
        """In a child process: what was evicted is made again when it is touched, and no budget holds."""

    # Steps of optimizers

    @abstractmethod
    def _steps_now(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to make a step."""

    @abstractmethod
    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has made a step."""

    def _ends_a_round(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is the first optimizer of those that are alive."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = ref(optimizer)
        return self._optimizer() is optimizer

    def _record_step(self) -> None:
        """A step is over."""
        (number, began, before), done, now = self._lap, self._counts(), perf_counter()
        self._lap = number + 1, now, done
        step = Step(
            number=number + 1,
            peak=self._lap_peak(),
            evictions=done.evictions - before.evictions,
            operations=done.operations - before.operations,
            repeated=done.rematerializations - before.rematerializations,
            compute=done.seconds - before.seconds,
            repeated_compute=done.repeated_seconds - before.repeated_seconds,
            seconds=now - began,
        )
        self._steps.append(step)
        self._look_at(step)
        for listener in list(self._listeners):
            listener(step)

    @abstractmethod
    def _counts(self) -> Counts:
        """What has been done so far."""

    @abstractmethod
    def _lap_peak(self) -> int:
        """The most bytes in use since this was last asked."""

    @abstractmethod
    def _look_at(self, step: Step) -> None:
        """Learn from a step, and warn of what it shows."""

    # What a user asks

    def on_step(self, listener: Callable[[Step], Any]) -> None:
        """Call `listener(step)` after each step of the first optimizer, with what it took: see `Step`."""
        if not callable(listener):
            raise TypeError(f"on_step takes a function of a Step, not {listener!r}")
        self._listeners.append(listener)

    @abstractmethod
    def report(self) -> Report:
        """What holds memory, what the last steps took, and what more memory would give."""

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()
