"""An exception from the handler of a signal, at any moment: nothing is lost, nothing stays locked, results are right.

Python looks for signals where a function is entered, after calls, and where a loop begins anew. Each such place inside
the engine and the policies is one where an interrupt strikes here, deterministically (`Tracing`); so are the borders of
their functions (`Interrupts`), which strike in every thread; and there are real signals (`Storm`). What comes out is
compared with what `Identity` gives. INTERRUPT_STRIDE=1 strikes at all places instead of some.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, Thread, current_thread, main_thread
from typing import Any, ClassVar
from weakref import WeakSet

import pytest

import recompute as rc
from interrupts import (
    COMPILED,
    Interrupts,
    Storm,
    Tracing,
    delivered,
    enough,
    holders_in,
    in_plain,
    modules_in,
    struck,
)
from lib.programs import (
    Apply,
    Budget,
    Detach,
    Drop,
    Evict,
    Gather,
    Get,
    Hold,
    Injected,
    Interpreter,
    LetGo,
    Observation,
    Pin,
    Program,
    ReleaseMemory,
    Source,
    Unpin,
    difference,
    run,
)
from recompute import extend
from recompute._locks import gate, gate_if_free
from recompute.testing import Identity, ManualClock, check_invariants

STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "0"))  # of the places at which one strikes; 0: each test's own
LONG = 60.0  # seconds: only a deadlock takes as long
MODULES = modules_in("recompute._engine", "recompute._policy", "recompute._recomputable")


class Timeout(Injected):
    """What a handler for a time limit raises: an Exception."""


class Halt(BaseException):
    """What a library's handler raises: no Exception, and not Python's own."""


ERRORS = (KeyboardInterrupt, Timeout, Halt)

PROGRAM = Program(
    [
        Source((1, 2)),
        Apply("add", (0, 0)),
        Apply("scale", (1,), "list"),
        Apply("halves", (-1, -2)),
        Apply("tail", (2,)),
        Apply("twins", (1, 2)),
        Pin(3),
        Apply("grow", (-1, 4), peeks=(1,)),
        Get(2),
        Hold(4),
        Evict(4),
        Apply("add", (-1, -2), "nested", peeks=(2, 4), inside="evict"),
        Drop(5),
        Apply("scale", (-1,), peeks=(1,), inside="apply"),
        Evict(2),
        Apply("pair", (-1, 3)),
        LetGo(),
        Detach(4),
        Get(1),
        Unpin(3),
        Drop(2),
        ReleaseMemory(40),
        Apply("windows", (-1,)),
        Budget(80),
        Get(3),
        Apply("add", (-1, -4, 3), "keyword"),
        Drop(-2),
        Evict(-1),
        Get(-1),
    ]
)
OTHER = Program(
    [
        Source((1, 2, 3)),
        Source((4,), "gpu:0"),
        Apply("swelling", (0,)),
        Apply("restless", (0,)),
        Apply("mixture", (0,)),
        Apply("move", (2,)),
        Gather((2, 3, -1), "tuple"),
        Apply("add", (0, 2), "applied"),
        Gather((0, 2), "traverse"),
        Evict(2),
        Evict(3),
        Evict(4),
        Get(2),
        Get(3),
        Apply("count", (2,), peeks=(3,)),
        Apply("scale", (2,), nbytes=40),
        Drop(3),
        Apply("grow", (2, 4)),
        Apply("add", (-1, -2, 2)),
        Evict(2),
        Evict(-2),
        Evict(-3),
        Evict(-1),
        Get(-1),
        Detach(-1),
        ReleaseMemory(),
        ReleaseMemory(8, "gpu:0"),
        Get(2),
        Get(-2),
    ]
)

BUDGETS = {PROGRAM: 208, OTHER: 430}  # bytes: of 300 and 720 that they take without one


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Python could not raise, since it struck in a destructor: nothing but interrupts may be among that."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append((args.exc_type, str(args.exc_value))))
    yield found
    assert [error for error in found if not issubclass(error[0], ERRORS)] == []


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    """Every function of the modules, and every method of their classes, lets interrupts in."""
    wanted = Interrupts()
    names = {module.__name__ for module in MODULES}
    wanted.let_in(monkeypatch, holders_in(MODULES), lambda function, name: function.__module__ in names)
    yield wanted
    wanted.arm(0)


def strike_with(error: type[BaseException]) -> Callable[[], None]:
    def handle(number: int, frame: object) -> None:
        raise error

    def strike() -> None:
        if current_thread() is not main_thread():  # where no signal comes
            raise error
        signal.signal(signal.SIGUSR2, handle)
        signal.raise_signal(signal.SIGUSR2)

    return strike


def interrupted(interpreter: Interpreter, program: Program, interrupts: Interrupts) -> list[Observation]:
    """What can be observed of a program; a step that was interrupted counts as one with a fault."""
    found: list[Observation] = []
    for step in program:
        try:
            with interrupts.on():
                seen = interpreter.do(step)
        except ERRORS:
            seen = ("fault",)
        found.append(seen)
    return found


def check_all(cache: rc.Cache, interpreter: Interpreter, program: Program, found: list[Observation]) -> None:
    """All is as the identity has it, what is counted is right, and nothing is locked or left behind."""
    delivered(cache, ERRORS)
    assert extend.running() is None
    assert gc.isenabled()
    assert not cache._engine.lock._is_owned()  # type: ignore[attr-defined]  # an RLock has it
    check_invariants(cache, interpreter.roots)
    stats = cache.stats()
    assert all(pool.peak <= BUDGETS[program] + pool.overshoot for pool in stats.pools)
    wrong = difference(run(program, Identity), found + interpreter.finish())
    assert wrong is None, wrong
    check_invariants(cache, interpreter.roots)
    interpreter.__init__(rc, cache)  # type: ignore[misc]  # lets go of everything
    gc.collect()  # tracebacks
    while cache.release == "ignore" and cache.release_memory():
        pass
    assert cache.stats().used == 0
    assert not cache._engine.memory.storages
    cache.budget = BUDGETS[program]
    with cache:
        assert rc.ap(bytes, 1, nbytes=BUDGETS[program]).get() == b"\0"
    check_invariants(cache)
    assert gc.isenabled()


def strike_everywhere(
    interrupts: Interrupts,
    error: type[BaseException],
    count: int,
    settings: dict[str, Any],
    *,
    program: Program = PROGRAM,
    first: int = 1,
    again: tuple[int, ...] = (),
) -> None:
    """Run the program again and again, with an interrupt at other places each time, `count` times.

    `again`: and at so many places after that.
    """

    def attempt(place: int) -> None:
        cache = rc.Cache(BUDGETS[program], clock=ManualClock(), **settings)
        interpreter = Interpreter(rc, cache)
        interrupts.arm(*([place, *(place + more for more in again)] if place else []), strike=strike_with(error))
        found = interrupted(interpreter, program, interrupts)
        places.append(interrupts.crossings)
        interrupts.arm(0)
        try:
            assert rc.current_cache() is rc.default_cache()
            check_all(cache, interpreter, program, found)
        except Exception as wrong:
            wrong.add_note(f"{error.__name__} at {interrupts.where} ({place} of {places[0]}), {again}, {settings}")
            raise

    places: list[int] = []
    attempt(0)
    assert enough(places[0], 1000, compiled=30)
    for place in range(first, places[0], STRIDE or max(1, places[0] // count)):
        attempt(place)


SLOW = pytest.mark.slow
CHOICES = [
    ("needed", "eager"),
    ("needed", "ignore"),
    ("needed", "banish"),
    ("dtr-eq", "eager"),
    ("dtr", "banish"),
    ("lru", "ignore"),
]


@pytest.mark.parametrize("choice", [0, 1, *(pytest.param(number, marks=SLOW) for number in range(2, len(CHOICES)))])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("program", [pytest.param(PROGRAM, id="one"), pytest.param(OTHER, id="other", marks=SLOW)])
def test_where_python_looks_for_signals(program: Program, error: type[BaseException], choice: int) -> None:
    """Wherever in the engine an exception of any class strikes, nothing is lost or locked, and results are right."""
    policy, release = CHOICES[choice]
    settings = {"policy": policy, "release": release}
    first = 1 + choice + 6 * ERRORS.index(error)
    strike_everywhere(Tracing(MODULES), error, 25, settings, program=program, first=first)


@pytest.mark.parametrize("choice", range(len(CHOICES)))
@pytest.mark.parametrize("program", [PROGRAM, OTHER], ids=["one", "other"])
def test_between_any_two_lines(program: Program, choice: int) -> None:
    """Nor does it matter between which lines, be it in an `except` or a `finally`."""
    policy, release = CHOICES[choice]
    settings = {"policy": policy, "release": release}
    strike_everywhere(Tracing(MODULES, lines=True), ERRORS[choice % 3], 25, settings, program=program, first=1 + choice)


@pytest.mark.parametrize("choice", range(len(CHOICES)))
@pytest.mark.parametrize("program", [PROGRAM, OTHER], ids=["one", "other"])
def test_around_any_function(program: Program, choice: int, wrapped: Interrupts) -> None:
    """Nor whether it strikes as a function is entered, or after it has done all it was to do."""
    policy, release = CHOICES[choice]
    settings = {"policy": policy, "release": release}
    strike_everywhere(wrapped, ERRORS[choice % 3], 35, settings, program=program, first=1 + choice)


@pytest.mark.parametrize("later", [1, 2, 3, 5, 8, 15, 30, 60, 120, 240])
def test_two_interrupts(later: int) -> None:
    """One may strike while what another has left is made good."""
    strike_everywhere(Tracing(MODULES), ERRORS[later % 3], 15, {}, first=later, again=(later,))


def test_one_interrupt_after_the_other() -> None:
    """There may be many of them, too."""
    strike_everywhere(Tracing(MODULES), KeyboardInterrupt, 10, {}, again=tuple(range(40, 4000, 40)))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("search", ["sample", "batch"])
def test_with_other_searches_and_checks(search: str, verify: bool) -> None:
    """So it is with every search, with a score of the user's, and where results are checked."""
    settings = {"search": search, "verify": verify, "policy": lambda cost, neighbours, size, staleness: -size}
    strike_everywhere(Tracing(MODULES), KeyboardInterrupt, 20, settings)


class Block:
    """A payload of 100 bytes; those that are alive are known."""

    alive: ClassVar[WeakSet[Block]] = WeakSet()

    def __init__(self, number: int) -> None:
        self.number = number
        Block.alive.add(self)


rc.register_size(Block, lambda block: 100)
clock = ManualClock()


def block(*parts: Block) -> Block:
    clock.advance(0.01)
    return Block((sum(part.number for part in parts) + 1) % 256)


class Blocks:
    """Blocks in a cache that has room for five of them."""

    def __init__(self, length: int = 8) -> None:
        self.cache = rc.Cache(500, clock=clock)
        self.values: list[rc.Recomputable[Block]] = []
        with self.cache:
            self.values.append(rc.ap(block))
            for number in range(1, length):
                self.values.append(rc.ap(block, self.values[-1], self.values[number // 2]))
        self.expected = [value.get().number for value in self.values]

    def check(self) -> None:
        """All is right, and an operation may have all the memory."""
        delivered(self.cache, ERRORS)
        check_invariants(self.cache, self.values)
        assert [value.get().number for value in self.values] == self.expected
        with self.cache:
            assert rc.ap(bytes, 1, nbytes=500).get() == b"\0"
        assert [value.get().number for value in reversed(self.values)] == self.expected[::-1]
        check_invariants(self.cache, self.values)
        assert gc.isenabled()


def everywhere(work: Callable[[Blocks], None], count: int, attempt: Callable[[Blocks, Tracing], None]) -> None:
    """`attempt` with an interrupt to come at about so many of the places that `work` passes, one at a time."""
    tracing = Tracing(MODULES)
    work(Blocks())  # what is found out once, such as the names in a function, is known from here on
    blocks = Blocks()
    gc.collect()  # garbage of other tests, whose collection would pass more places
    with tracing.on():
        work(blocks)
    places = tracing.crossings
    assert enough(places, 100)
    del blocks
    tried = range(1, places, STRIDE or max(1, places // count))
    struck = 0
    for place in tried:
        tracing.arm(place, strike=strike_with(KeyboardInterrupt))
        try:
            attempt(Blocks(), tracing)
        except Exception as wrong:
            wrong.add_note(f"at {tracing.where} ({place} of {places})")
            raise
        struck += tracing.struck
    assert struck >= 0.95 * len(tried)  # a collection may pass places in one run and not in the next


def test_what_is_alive_is_counted() -> None:
    """After an interrupt what callers hold, and what the cache keeps, is counted as used."""

    def work(blocks: Blocks) -> None:
        held.append(blocks.values[3].get())
        blocks.values[3].evict()
        blocks.values[7].get()
        blocks.cache.budget = 600
        blocks.values[7].map(block)
        blocks.cache.release_memory(200)

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        held.clear()
        with suppress(KeyboardInterrupt), tracing.on():
            work(blocks)
        delivered(blocks.cache, ERRORS)
        gc.collect()
        assert blocks.cache.stats().used >= 100 * len(Block.alive)
        held.clear()
        assert blocks.cache.stats().held == 0
        assert blocks.cache.stats().used == 100 * len(Block.alive)
        blocks.cache.budget = 500
        blocks.check()

    held: list[Block] = []
    everywhere(work, 80, attempt)


@pytest.mark.parametrize("error", ERRORS)
def test_a_function_that_lives_with_an_interrupt(error: type[BaseException]) -> None:
    """An interrupt in a `get` inside an operation may be caught there: the function goes on, and so do those around."""

    def work(blocks: Blocks) -> None:
        def careful(part: Block) -> Block:
            try:
                return block(part, blocks.values[4].get(), blocks.values[5].get())
            except error:
                return block(part, blocks.values[4].get(), blocks.values[5].get())

        with blocks.cache:
            inner = blocks.values[2].map(careful)
            outer = blocks.values[1].map(lambda part: block(part, inner.get()))
            for value in (inner, outer, blocks.values[4], blocks.values[5]):
                value.evict()
            numbers = blocks.expected
            assert outer.get().number == numbers[1] + numbers[2] + numbers[4] + numbers[5] + 2

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        tracing.arm(tracing.strikes_at[0], strike=strike_with(error))
        with suppress(error), tracing.on():  # suppressed: if it was not in the `get`
            work(blocks)
        gc.collect()  # what the traceback held
        blocks.check()

    everywhere(work, 50, attempt)


def test_while_another_thread_runs_a_function() -> None:
    """What a function in another thread has locked and reserved stays so, and it ends as if nothing had happened."""

    def work(blocks: Blocks) -> None:
        for value in blocks.values[:5]:
            value.get()
        blocks.values[2].evict()
        with blocks.cache:
            rc.ap(block, blocks.values[2], blocks.values[4])

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        running, go = Event(), Event()
        made: list[rc.Recomputable[Block]] = []

        def slow(part: Block) -> Block:
            running.set()
            assert go.wait(LONG)
            return block(part)

        def other() -> None:
            with blocks.cache:
                made.append(rc.ap(slow, blocks.values[6], nbytes=100))

        thread = Thread(target=other, daemon=True)
        thread.start()
        assert running.wait(LONG)
        with suppress(KeyboardInterrupt), tracing.on():
            work(blocks)
        delivered(blocks.cache, ERRORS)
        check_invariants(blocks.cache, blocks.values)
        assert not blocks.values[6].evict()
        assert blocks.cache._engine.scheduler.executing == 1
        go.set()
        thread.join(LONG)
        assert not thread.is_alive()
        assert made[0].get().number == (blocks.expected[6] + 1) % 256
        made.clear()
        blocks.check()

    everywhere(work, 60, attempt)


def test_what_adapters_and_programs_use_besides() -> None:
    """So it is with all that the surface and the engine's public interface offer, and with listeners."""

    def function(payload: Block) -> Block:
        return block(payload)

    def work(blocks: Blocks) -> None:
        heard: list[Any] = []
        cache, values = blocks.cache, blocks.values
        stop = cache.subscribe(heard.append)
        with cache:
            first, place = values[1]._node, sys._getframe()
            assert "Recomputable" in repr(values[1])
            assert copy.copy(values[1]).get().number == blocks.expected[1]
            assert rc.Recomputable(cache, first).number == values[1].number
            assert rc.lift(block)(values[1]).get().number == blocks.expected[1] + 1
            assert [value.number for value in rc.sequence([values[1], values[2]]).get()] == blocks.expected[1:3]
            assert rc.pure(block).apply(values[1]).get().number == blocks.expected[1] + 1
            with cache.extend.keep(values[3]._node):
                assert not values[3].evict()
            made = cache.extend.adopt(block(), function, [first], [first], place, cost=1.0, handle=rc.Recomputable)
            made.evict()
            other = rc.ap(block, values[1], values[2])
            user = rc.ap(block, other)
            cache.extend.exchange(made, other)
            cache.extend.set_room(made._node, [("cpu", 100)])
            cache.extend.overwrite(other, rc.ap(block, other))
            cache.extend.needed(user._node)
            cache.extend.dependents(first)
            values[4].evict()
            seen = cache.extend.view(values[4], function, None, place)
            user.evict()
            assert user.get().number == blocks.expected[1] + blocks.expected[2] + 2
            assert seen is None or seen.get().number == blocks.expected[4] + 1
        stop()

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        with suppress(KeyboardInterrupt), tracing.on():
            work(blocks)
        gc.collect()  # what the traceback held
        blocks.check()
        assert blocks.cache.stats().used <= 500

    everywhere(work, 150, attempt)


def evict_and_get(blocks: Blocks) -> None:
    for value in blocks.values[::2]:
        value.evict()
    blocks.values[-1].get()


def test_after_the_collector_was_frozen() -> None:
    """What is made good is found in the cache, not among what the garbage collector looks at."""

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        gc.freeze()
        try:
            with suppress(KeyboardInterrupt), tracing.on():
                evict_and_get(blocks)
            blocks.check()
        finally:
            gc.unfreeze()

    everywhere(evict_and_get, 40, attempt)


@in_plain
@pytest.mark.parametrize("later", [10, 30, 50])
def test_what_two_interrupts_have_left_needs_no_collection(later: int) -> None:
    """A result that no call has returned goes, even if a second one strikes while the first is being made good."""

    def work(blocks: Blocks) -> None:
        blocks.values[2].map(block)

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        place = tracing.strikes_at[0]
        tracing.arm(place, place + later)
        gc.disable()
        try:
            with suppress(KeyboardInterrupt), tracing.on():
                work(blocks)
            delivered(blocks.cache, ERRORS)
            assert len(blocks.cache._engine.memory.storages) == len(blocks.values)
        finally:
            gc.enable()

    everywhere(work, 60, attempt)


@in_plain
def test_a_handler_that_uses_the_cache() -> None:
    """It may, but for the middle of a change: there it is told so; what it interrupted is not harmed."""

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        def use() -> None:
            try:
                blocks.values[1].evict()
                assert blocks.values[5].get().number == blocks.expected[5]
                assert blocks.values[0].map(block).get().number == blocks.expected[0] + 1
                could.append(tracing.where)
            except RuntimeError as error:
                told.append(str(error))

        tracing.arm(tracing.strikes_at[0], strike=use)
        with tracing.on():
            evict_and_get(blocks)
        blocks.check()

    could: list[str] = []
    told: list[str] = []
    everywhere(evict_and_get, 60, attempt)
    assert could
    assert told
    assert all("handler of a signal" in message for message in told)


@in_plain
def test_an_interrupt_in_a_destructor_is_raised_by_the_next_use(unraisable: list[Any]) -> None:
    """What strikes while a value goes that nobody refers to any more cannot be raised there; the next use does."""

    def work(blocks: Blocks) -> None:
        del blocks.values[-2:], blocks.expected[-2:]

    def attempt(blocks: Blocks, tracing: Tracing) -> None:
        before = len(unraisable)
        with tracing.on():
            work(blocks)
        try:
            blocks.cache.stats()
        except KeyboardInterrupt:
            raised.append(tracing.where)
        else:
            assert len(unraisable) == before + 1  # it came before the destructor could see to it
        blocks.check()

    raised: list[str] = []
    everywhere(work, 60, attempt)
    assert len(raised) > 10


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
def test_a_storm_of_signals(error: type[BaseException]) -> None:
    """Real signals, at moments that nobody chose."""
    storm = Storm(MODULES, error, 0.0005)
    for number in range(40):
        policy, release = CHOICES[number % len(CHOICES)]
        cache = rc.Cache(BUDGETS[PROGRAM], clock=ManualClock(), policy=policy, release=release)  # type: ignore[arg-type]
        interpreter = Interpreter(rc, cache)
        with storm.on():
            found = interrupted(interpreter, PROGRAM, Interrupts())
        check_all(cache, interpreter, PROGRAM, found)
    assert storm.strikes


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
@pytest.mark.parametrize("way", ["lock", "gate", "if free"])
def test_no_signal_leaves_a_lock_acquired(way: str) -> None:
    """Wherever it strikes as a lock is acquired and released, in Python 3.14 too."""
    lock: Any = extend.RLock()
    ways = {"lock": lock, "gate": gate(lock.__enter__, lock.__exit__), "if free": gate_if_free(lock)}
    entered = ways[way]

    def work() -> None:
        with entered:
            pass

    for _ in struck(work, 300, 0.0001, Halt):
        assert not lock._is_owned()


@pytest.mark.skipif(not COMPILED, reason="in the plain form a signal can come before a block has been left")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
def test_no_signal_leaves_a_cache_current() -> None:
    """Wherever it strikes as a block is entered and left, and as a memoized function runs in its own cache."""

    @rc.memoize(cache=rc.Cache())
    def own(number: int) -> int:
        return number

    def work() -> None:
        with cache:
            pass
        own(len(numbers))
        numbers.append(0)

    numbers: list[int] = []
    cache, before = rc.Cache(), rc.current_cache()
    for _ in struck(work, 300, 0.0001, Halt):
        assert rc.current_cache() is before


@pytest.mark.skipif(not COMPILED, reason="in the plain form a signal can come before a block has been left")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
def test_no_signal_leaves_an_iteration_open() -> None:
    """Wherever it strikes as one begins and ends, another one can begin."""
    cache = rc.Cache()

    def work() -> None:
        with cache.iteration():
            pass

    for _ in struck(work, 300, 0.0001, Halt):
        work()


@in_plain  # compiled, nothing else can stand for a value
def test_an_interrupt_is_raised_in_the_thread_that_it_struck() -> None:
    """One that came in a destructor waits for that thread, whoever else uses the cache."""
    blocks = Blocks()

    class Struck:
        @property
        def storage(self) -> Any:
            raise KeyboardInterrupt

    def other() -> None:
        found.extend(value.get().number for value in blocks.values)

    found: list[int] = []
    doomed = rc.Recomputable(blocks.cache, blocks.values[3]._node)
    doomed._node = Struck()  # type: ignore[assignment]
    del doomed
    thread = Thread(target=other)
    thread.start()
    thread.join(LONG)
    assert found == blocks.expected
    with pytest.raises(KeyboardInterrupt):
        blocks.values[0].evict()
    blocks.check()


def test_a_storm_of_signals_while_threads_work() -> None:
    """So it is while other threads use the cache, who never notice."""

    def other() -> None:
        try:
            while not over.is_set():
                for value, expected in zip(blocks.values[::-1], blocks.expected[::-1], strict=True):
                    assert value.get().number == expected
        except BaseException as error:
            errors.append(error)

    blocks = Blocks(12)
    blocks.cache.budget = 1100
    over = Event()
    errors: list[BaseException] = []
    threads = [Thread(target=other, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    storm = Storm(MODULES, KeyboardInterrupt, 0.0005)
    try:
        with storm.on():
            for _ in range(100):
                with suppress(KeyboardInterrupt):
                    for value in blocks.values[::2]:
                        value.evict()
                    blocks.values[0].map(block)
    finally:
        over.set()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert errors == []
    assert storm.strikes
    delivered(blocks.cache, ERRORS)
    blocks.cache.budget = 500
    blocks.check()


def test_an_interrupt_where_a_wait_has_just_let_go_of_the_lock() -> None:
    """As it may come in `Condition.wait`: the lock is held again where the wait was called, and free after that."""
    cache = rc.Cache()
    changes = cache._engine.changes

    def wait() -> None:
        changes.lock._release_save()  # type: ignore[attr-defined]  # as Condition.wait does
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), changes.alone(), changes.begun():
        changes.pause(wait)
    assert not changes.is_mine()
    with cache:
        value = rc.pure(2).map(abs)
    assert value.get() == 2
    check_invariants(cache)


@pytest.mark.parametrize(
    ("limits", "always"), [([None], True), ([60], False), ([40, None], False), ([40, None], True)], ids=str
)
@pytest.mark.parametrize("program", [PROGRAM, OTHER], ids=["one", "other"])
@pytest.mark.filterwarnings("ignore:a value could not be:RuntimeWarning")  # not all can be pickled
def test_while_values_move(program: Program, always: bool, limits: list[int | None]) -> None:
    """With tiers below, too: what was on its way there, or back, or further down is neither lost nor twice there."""
    tracing = Tracing([*MODULES, *modules_in("recompute._tiers")])
    tiers = [rc.Host(limit, always=always) for limit in limits]
    for choice, (policy, release) in enumerate(CHOICES):
        settings = {"policy": policy, "release": release, "tiers": tiers}
        strike_everywhere(tracing, KeyboardInterrupt, 20, settings, program=program, first=1 + 7 * choice)


def struck_at_each_line(attempt: Callable[[Callable[[], None]], None]) -> int:
    """Run `attempt(arm)` with a signal whose handler raises at the first line of the library after `arm()`, at the
    second, and so on; how often one struck."""
    before = signal.signal(signal.SIGALRM, _raise_halt)
    tracing = Tracing(modules_in("recompute"), lines=True)
    try:
        for at in range(1, 10_000):
            tracing.arm(at, strike=lambda: signal.raise_signal(signal.SIGALRM))
            attempt(tracing.start)
            sys.settrace(None)
            if not tracing.struck:
                return at - 1
        raise AssertionError("it goes on and on")
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGALRM, before)


def _raise_halt(number: int, frame: Any) -> None:
    raise Timeout


@in_plain
def test_an_interrupt_at_each_line_as_the_last_reference_goes() -> None:
    """Afterwards all is counted right, and the interrupt ends the next request if it could not be raised at once."""
    lost: list[int] = []

    def attempt(arm: Callable[[], None]) -> None:
        with rc.Cache("1MB") as cache:
            a = rc.ap(bytes, 100_000)
            b = rc.ap(bytes.upper, a)
            a.evict()
            raised = 0
            arm()
            try:
                del a
                sys.settrace(None)
                cache.stats()
            except Timeout:
                raised = 1
            finally:
                sys.settrace(None)
            cache.stats()
            check_invariants(cache, [b])
            lost.append(1 - raised)

    times = struck_at_each_line(attempt)
    assert times > 40
    assert sum(lost[:times]) <= 2, "none, but at the beginning of the destructor, before any `try`"


@in_plain
def test_an_interrupt_at_each_line_as_one_more_reference_comes() -> None:
    """A Recomputable that was not finished, and goes, does not take with it what another one refers to."""

    def attempt(arm: Callable[[], None]) -> None:
        with rc.Cache("1MB") as cache:
            a = rc.ap(bytes, 100_000)
            arm()
            with suppress(Timeout):
                rc.Recomputable(cache, extend.node_of(a))
            sys.settrace(None)
            with suppress(Timeout):
                cache.stats()  # raises what struck in the destructor
            check_invariants(cache, [a])
            a.evict()
            assert len(a.get()) == 100_000

    assert struck_at_each_line(attempt) > 20


@in_plain
def test_an_interrupt_at_each_line_as_two_references_change_places() -> None:
    """Each refers to what it did, or to what the other one did, and neither value is lost."""

    def attempt(arm: Callable[[], None]) -> None:
        with rc.Cache("1MB") as cache:
            a, b = rc.ap(bytes, 1_000), rc.ap(bytes, 2_000)
            arm()
            with suppress(Timeout):
                cache.extend.exchange(a, b)
            sys.settrace(None)
            with suppress(Timeout):
                cache.stats()
            check_invariants(cache, [a, b])
            a.evict()
            b.evict()
            assert {len(a.get()), len(b.get())} == {1_000, 2_000}

    assert struck_at_each_line(attempt) > 20


def test_an_interrupt_at_each_line_as_a_copy_in_a_tier_goes() -> None:
    """Its bytes count no more, wherever in its destructor one strikes."""

    def attempt(arm: Callable[[], None]) -> None:
        with rc.Cache("1MB", tiers=[rc.Host(always=True)]) as cache:
            a = rc.ap(bytes, 100_000)
            a.evict()
            assert cache.stats().tiers[0].used
            arm()
            with suppress(Timeout):
                del a
            sys.settrace(None)
            delivered(cache, ERRORS)
            assert cache.stats().tiers[0].used == 0
            check_invariants(cache)

    assert struck_at_each_line(attempt) > 5
