"""Interrupts in the middle of a training: wherever one arrives, the training goes on as plain torch does."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import pytest
from interrupts import Interrupts

from recompute._engine import requests
from recompute._engine.engine import Engine
from recompute._engine.finalizer import Departure, Finalizer
from recompute._engine.frames import Frame, Request
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory, Pool
from recompute._engine.meter import Meter
from recompute._engine.references import References
from recompute._engine.results import Results
from recompute._engine.scheduler import Scheduler

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_steps import BUDGET, Training, check_left, go_on  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402
import recompute_torch as rt  # noqa: E402
from recompute import extend  # noqa: E402
from recompute_torch import _block, _memory, _recipe, _storages, _tracker  # noqa: E402

ENGINE = (
    *(Engine, Memory, Pool, References, Results, Scheduler, Frame, Request, Finalizer, Departure, Journal, Meter),
    *(requests, extend, rc.Cache),
)
ADAPTER = (
    *(_block._Mode, _tracker, _tracker.Tracker, _storages, _recipe, _recipe.Call, _recipe.Write, _recipe.Look),
    *(_memory, _memory.Memory, _memory.MemoryAdapter),
)
HERE = Path(_block.__file__).parent
"""Where the adapter's code is."""

STRIDE = 31  # of the crossings at which a signal arrives
PARTS = 4  # tests that share them

pytestmark = pytest.mark.usefixtures("one_thread")
Arming = Callable[[Callable[[], None], bool], Interrupts]


@pytest.fixture
def arming(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arming]:
    """Interrupts that strike in some way: at the mode, before and after each operator, or anywhere inside."""
    made: list[Interrupts] = []

    def make(strike: Callable[[], None], anywhere: bool) -> Interrupts:
        wanted = Interrupts(strike)
        made.append(wanted)
        wanted.let_in(monkeypatch, [_block._Mode], lambda method, name: name == "__torch_dispatch__")
        if anywhere:
            wanted.let_in(monkeypatch, ENGINE, lambda method, name: not name.startswith("__"))
            wanted.let_in(monkeypatch, ADAPTER, lambda method, name: not name.startswith("__") or name == "__call__")
        return wanted

    gc.freeze()  # a repair looks at every object of the process: at none of those that are there before the test
    yield make
    gc.unfreeze()
    for each in made:
        each.arm(0)


def count(interrupts: Interrupts) -> int:
    """The crossings of two steps."""
    training = Training()
    with rt.budget(BUDGET) as block:
        interrupts.arm(0)
        training.step(1)
        training.step(2)
        crossings = interrupts.crossings
    assert block.stats().rematerializations
    return crossings


def strike_at(crossing: int, interrupts: Interrupts, plain: Any) -> bool:
    """Whether this crossing was reached: then the interrupt came out, and the training went on as it should."""
    training, struck = Training(), False
    with rt.budget(BUDGET) as block:
        interrupts.arm(crossing)
        try:
            training.step(1)
            training.step(2)
        except KeyboardInterrupt:
            struck = True
        assert struck == (interrupts.crossings >= crossing)
        interrupts.arm(0)
        copied = go_on(block, training, plain[0])
    check_left(block, training, copied, plain[1])
    return struck


def test_an_exception_between_operators(arming: Arming, plain: Any) -> None:
    """What a handler of the program's own raises, before or after an operator of forward, backward or optimizer."""

    def strike() -> None:
        raise KeyboardInterrupt

    interrupts = arming(strike, False)
    struck = [strike_at(each, interrupts, plain) for each in range(1, count(interrupts), 3)]
    assert sum(struck) > 50


def test_an_exception_anywhere(arming: Arming, plain: Any) -> None:
    """The same in the middle of the bookkeeping, where a handler of the program's own is not held back."""

    def strike() -> None:
        raise KeyboardInterrupt

    interrupts = arming(strike, True)
    struck = [strike_at(each, interrupts, plain) for each in range(1, count(interrupts), 17 * STRIDE)]
    assert sum(struck) > 20


class Lines:
    """Raises before the line of the adapter that is reached as the `at`-th."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.reached = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if Path(frame.f_code.co_filename).parent != HERE:
            return None
        if event == "line":
            self.reached += 1
            if self.reached == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def steps_by_lines(at: int, plain: Any) -> int:
    """Two steps, with an exception before a line of the adapter, and how many lines there were; 0: without one."""
    training, lines, before = Training(), Lines(at), sys.gettrace()
    with rt.budget(BUDGET) as block:
        try:
            sys.settrace(lines)
            training.step(1)
            training.step(2)
        except KeyboardInterrupt:
            assert lines.reached == at
        finally:
            sys.settrace(before)
        copied = go_on(block, training, plain[0])
    check_left(block, training, copied, plain[1])
    return lines.reached


def test_an_exception_before_a_line(plain: Any) -> None:
    """Wherever in the adapter an exception comes up, torch is as it was in this thread, and the training goes on."""
    lines = steps_by_lines(0, plain)
    for at in range(1, lines, lines // 25):
        steps_by_lines(at, plain)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_signal_anywhere(part: int, arming: Arming, plain: Any) -> None:
    """Ctrl-C in the middle of the bookkeeping interrupts at the end of the operator, with the books complete."""
    interrupts = arming(partial(signal.raise_signal, signal.SIGINT), True)
    before = signal.getsignal(signal.SIGINT)
    places = range(1 + part * STRIDE, count(interrupts), PARTS * STRIDE)
    struck = [strike_at(each, interrupts, plain) for each in places]
    assert sum(struck) > 20
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("main_is_first", [True, False])
@pytest.mark.parametrize("main_is_last", [True, False])
def test_the_handler_goes_with_the_main_thread(main_is_first: bool, main_is_last: bool) -> None:
    """Whoever enters first and leaves last: signals are held back as long as the main thread is in the block."""
    before = signal.getsignal(signal.SIGINT)
    entered, may_leave = Event(), Event()

    def other() -> None:
        with block:
            entered.set()
            may_leave.wait(60)

    block = rt.budget()
    thread = Thread(target=other)
    with ExitStack() as main:
        if main_is_first:
            main.enter_context(block)
        thread.start()
        assert entered.wait(60)
        if not main_is_first:
            main.enter_context(block)
        assert signal.getsignal(signal.SIGINT) != before
        if main_is_last:
            may_leave.set()
            thread.join()
            assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    may_leave.set()
    thread.join()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_while_the_block_is_left(arming: Arming) -> None:
    """It is raised when all tensors have their content."""
    interrupts = arming(partial(signal.raise_signal, signal.SIGINT), True)
    expected = Training()
    expected.step(1)
    expected.step(2)
    struck = 0
    for crossing in range(1, 400, 7):
        training = Training()
        try:
            with rt.budget(BUDGET) as block:
                training.step(1)
                training.step(2)
                block.cache.release_memory()
                interrupts.arm(crossing)
        except KeyboardInterrupt:
            struck += 1
        interrupts.arm(0)
        assert not block.stats().used
        assert training.contents() == expected.contents()
        for one, other in zip(training.kept, expected.kept, strict=True):
            assert torch.equal(one, other)
            assert not hasattr(one.untyped_storage(), "_recompute")
    assert struck > 20
