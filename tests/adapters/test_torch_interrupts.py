"""Interrupts in the middle of a training: wherever one arrives, the training goes on as plain torch does."""

from __future__ import annotations

import gc
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import pytest

from interrupts import Interrupts, enough
from recompute._engine import requests
from recompute._engine.engine import Engine
from recompute._engine.finalizer import Departure, Finalizer
from recompute._engine.frames import Frame, Request
from recompute._engine.journal import Journal
from recompute._engine.memory import Memory
from recompute._engine.meter import Meter
from recompute._engine.pool import Pool
from recompute._engine.references import References
from recompute._engine.results import Results
from recompute._engine.scheduler import Scheduler

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_steps import BUDGET, Training, check_left, go_on  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402
import recompute_torch as rt  # noqa: E402
from recompute import extend  # noqa: E402
from recompute_torch import _adapter, _block, _memory, _recipe, _storages, _tracker  # noqa: E402

ENGINE = (
    *(Engine, Memory, Pool, References, Results, Scheduler, Frame, Request, Finalizer, Departure, Journal, Meter),
    *(requests, extend, rc.Cache),
)
ADAPTER = (
    *(_block._Mode, _tracker, _tracker.Tracker, _storages, _recipe, _recipe.Call, _recipe.Write, _recipe.Look),
    *(_memory, _memory.Memory, _adapter.MemoryAdapter),
)
EXCHANGES = (
    *(_memory.uninterrupted, _memory.Memory.keep, _memory.Memory.give_back, _adapter.MemoryAdapter.vacate),
    *(_adapter.MemoryAdapter.restored, _storages.Storages._enter, _storages.Storages.hand_out),
)
"""What moves memory from one storage to another, or says whose it is."""
HERE = Path(_block.__file__).parent
"""Where the adapter's code is."""

STRIDE = 31  # of the crossings at which a signal arrives
PARTS = 4  # tests that share them

pytestmark = pytest.mark.usefixtures("in_python")
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
    for interrupts in made:
        interrupts.arm(0)


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
    reached: bool | None = None
    with rt.budget(BUDGET) as block:
        interrupts.arm(crossing)
        try:
            training.step(1)
            training.step(2)
            reached = interrupts.struck
            interrupts.arm(0)
            torch.ones(1).neg()  # what came last is raised by the next operator, or the next use of the cache
            block.stats()
        except KeyboardInterrupt:
            struck = True
        assert struck == (interrupts.struck if reached is None else reached)
        interrupts.arm(0)
        copied = go_on(block, training, plain[0])
    check_left(block, training, copied, plain[1])
    return struck


def test_an_exception_between_operators(arming: Arming, plain: Any) -> None:
    """What a handler of the program's own raises, before or after an operator of forward, backward or optimizer."""

    def strike() -> None:
        raise KeyboardInterrupt

    interrupts = arming(strike, False)
    struck = [strike_at(number, interrupts, plain) for number in range(1, count(interrupts), 3)]
    assert enough(sum(struck), 50, 25)


def test_an_exception_anywhere(arming: Arming, plain: Any) -> None:
    """The same in the middle of the bookkeeping, where a handler of the program's own is not held back."""

    def strike() -> None:
        raise KeyboardInterrupt

    interrupts = arming(strike, True)
    struck = [strike_at(number, interrupts, plain) for number in range(1, count(interrupts), 13 * STRIDE)]
    assert enough(sum(struck), 20, 10)


Place = tuple[CodeType, int]
"""A line of a function."""


class Lines:
    """Raises before the line of the adapter that is reached as the `at`-th; with a `place`, only that one counts."""

    def __init__(self, at: int, place: Place | None = None) -> None:
        self.at = at
        self.place = place
        self.reached = 0
        self.times: Counter[Place] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if Path(frame.f_code.co_filename).parent != HERE:
            return None
        if event == "line":
            here = frame.f_code, frame.f_lineno
            self.times[here] += 1
            if self.place in (None, here):
                self.reached += 1
                if self.reached == self.at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self


def steps_by_lines(at: int, plain: Any, place: Place | None = None) -> Lines:
    """Two steps, with an exception before a line of the adapter, and what lines there were; 0: without one."""
    training, lines, before = Training(), Lines(at, place), sys.gettrace()
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
    return lines


def test_an_exception_before_a_line(plain: Any) -> None:
    """Wherever in the adapter an exception comes up, torch is as it was in this thread, and the training goes on."""
    lines = steps_by_lines(0, plain).reached
    for at in range(1, lines, lines // 25):
        steps_by_lines(at, plain)


def test_an_exception_where_memory_changes_hands(plain: Any) -> None:
    """Of two storages with the same bytes one lets go of them: before, after, and never both or none."""
    codes = {exchange.__code__ for exchange in EXCHANGES}
    times = {place: count for place, count in steps_by_lines(0, plain).times.items() if place[0] in codes}
    assert {code for code, _ in times} == codes
    for place, count in times.items():
        steps_by_lines((count + 1) // 2, plain, place)


def kept(memory: Any, outer: Any) -> partial[Any]:
    return partial(memory.keep)


def given_back(memory: Any, outer: Any) -> partial[Any]:
    memory.keep()
    return partial(memory.give_back)


def parted(memory: Any, outer: Any) -> partial[Any]:
    memory.keep()
    others = torch.UntypedStorage(outer.nbytes())
    return partial(memory.give_back, partial(setattr, memory, "outer", None), partial(setattr, memory, "own", others))


def restored(memory: Any, outer: Any) -> partial[Any]:
    memory.keep()
    outer._swap_data_ptr_(_adapter.gone(outer.nbytes(), outer.device))
    return partial(_adapter.MemoryAdapter().restored, ref(outer), memory)


@pytest.mark.parametrize("prepare", [kept, given_back, parted, restored])
def test_bytes_have_one_owner(prepare: Callable[[Any, Any], partial[Any]]) -> None:
    """Before whatever line an exception comes up: the bytes go when their owner goes, and not before."""
    numpy = pytest.importorskip("numpy", reason="an array of NumPy tells when its bytes have gone")
    at, struck, before = 0, True, sys.gettrace()
    while struck:
        array = numpy.arange(8.0)
        there, address = ref(array), array.ctypes.data
        outer = torch.from_numpy(array).untyped_storage()
        memory = _memory.Memory("cpu", outer.nbytes(), ref(outer), None)
        act = prepare(memory, outer)
        del array
        at, struck = at + 1, False
        try:
            sys.settrace(Lines(at))
            act()
        except KeyboardInterrupt:
            struck = True
        finally:
            sys.settrace(before)
        del act
        if memory.own is not None and memory.own.data_ptr() == address:
            del outer
            assert there() is not None
            del memory
        else:
            del memory
            assert there() is not None
            del outer
        assert there() is None
    assert at > 3


def test_a_tensor_is_ordinary_again_after_a_first_meeting() -> None:
    """Before whatever line of that an exception comes up."""
    at, struck, before = 0, True, sys.gettrace()
    while struck:
        parameter = torch.nn.Parameter(torch.arange(4.0))
        at, struck = at + 1, False
        with rt.budget():
            try:
                sys.settrace(Lines(at))
                parameter * 2
            except KeyboardInterrupt:
                struck = True
            finally:
                sys.settrace(before)
        assert not hasattr(parameter.untyped_storage(), "_recompute")
        assert parameter.tolist() == [0, 1, 2, 3]
    assert at > 20


@pytest.mark.parametrize("part", range(PARTS))
def test_a_signal_anywhere(part: int, arming: Arming, plain: Any) -> None:
    """Ctrl-C in the middle of the bookkeeping interrupts at the end of the operator, with the books complete."""
    interrupts = arming(partial(signal.raise_signal, signal.SIGINT), True)
    before = signal.getsignal(signal.SIGINT)
    places = range(1 + part * STRIDE, count(interrupts), PARTS * STRIDE)
    struck = [strike_at(place, interrupts, plain) for place in places]
    assert enough(sum(struck), 20, 10)
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
    assert enough(struck, 20, 10)
