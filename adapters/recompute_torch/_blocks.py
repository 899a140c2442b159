"""Blocks as threads enter and leave them, and as optimizers make steps in them: what both paths have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Thread, local
from time import perf_counter
from typing import Any, ClassVar, Final, Literal, Self
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recompute.extend import Counts, RLock, leave_in_steps
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


choosing: Final[Any] = RLock()
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
    os.register_at_fork(after_in_child=choosing._at_fork_reinit)  # another thread may have had it


class _Here(local):
    """What a thread knows of a block."""

    entries: tuple[object, ...] = ()
    """Of `_entrances`, those that are this thread's."""
    joined = False
    """A thread that takes part has started this one."""
    aside = False
    """It takes no part while it is in another block."""
    others: Sequence[Block] = ()
    """Those that take no part while it is in this one."""
    mode: Any = None


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
        self._here = _Here()
        self._entrances: set[object] = set()  # an object for each entry that is not left, of all threads
        self._hooks: list[Any] = []
        self._optimizer: ref[torch.optim.Optimizer] | None = None
        self._lock = RLock()

    # Entering and leaving

    def __enter__(self) -> Self:
        if any(block is not self for block in getattr(current, "blocks", ())):
            raise RuntimeError(
                "a budget block is open in this thread already, and tensors can belong to one only; "
                "to change its budget, set block.budget"
            )
        here, entry = self._here, object()
        try:
            if not here.entries:  # it may have been started in another block, which it leaves for a while
                here.others = [block for block in open_blocks() if block is not self and block._is_here()]
            here.entries += (entry,)
            for block in here.others:
                block._step_aside()
            with self._lock:
                if not self._entrances:
                    self._open()
                    self._lap = 0, perf_counter(), self._counts()
                    with choosing:
                        blocks.add(self)
                        _threads.open(self)
                        _watch_optimizers()
                self._entrances.add(entry)
                self._take_part()
            current.blocks = [self] * len(here.entries)
        except BaseException:
            if entry in here.entries:
                leave_in_steps(self)
            raise
        return self

    __exit__ = leave_in_steps

    def leaving(self) -> Iterable[Callable[[], object]]:
        """What ends the innermost entry of this thread, in steps that can be done again: see `leave_in_steps`."""
        if not self._here.entries:
            raise RuntimeError("a budget block is left by the thread that entered it, and this one has not")
        *rest, entry = self._here.entries
        return (
            partial(self._leave, entry, tuple(rest)),
            partial(setattr, current, "blocks", [self] * len(rest)),
            self._let_others_go_on,
            self._interrupts.deliver,
        )

    def _leave(self, entry: object, rest: tuple[object, ...]) -> None:
        with self._lock:
            self._here.entries = rest
            self._entrances.discard(entry)
            if not self._is_here():
                self._step_out()
            try:
                if not self._entrances:
                    self._wind_up()
            finally:
                if not self._is_here():
                    self._interrupts.release()

    def _step_aside(self) -> None:
        """This thread takes part no longer, until `_go_on`."""
        self._here.aside = True
        self._step_out()

    def _go_on(self) -> None:
        self._here.aside = False
        if self in blocks and self._is_here():
            self._take_part()

    def _let_others_go_on(self) -> None:
        if not self._here.entries:
            for block in self._here.others:
                block._go_on()
            self._here.others = ()

    def _join(self) -> Callable[[], object]:
        """A thread has been started. What it does last: a mode that goes with a thread asks for the interpreter."""
        with self._lock:
            if self._entrances:
                self._here.joined = True
                self._take_part()
        return self._step_aside

    def _is_here(self) -> bool:
        """Whether this thread takes part."""
        here = self._here
        return bool(here.joined or here.entries) and not here.aside

    def _wind_up(self) -> None:
        """The last thread leaves, or an interrupt came as the first one entered."""
        try:
            self._close()
        finally:
            while self._hooks:
                self._hooks[-1].remove()
                self._hooks.pop()
            with choosing:
                _threads.close(self)
                blocks.discard(self)
                _watch_optimizers()

    @abstractmethod
    def _open(self) -> None:
        """The first thread enters. Raises RuntimeError if the block cannot be opened."""

    @abstractmethod
    def _close(self) -> None:
        """The last thread has left. May be called again, as all of these."""

    @abstractmethod
    def _take_part(self) -> None:
        """Operators of this thread are tracked, if they are not yet."""

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
