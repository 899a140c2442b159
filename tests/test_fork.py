"""A fork at any moment: the child's caches work, hold what the parent's did, and wait for no thread of the parent's."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
from interrupts import Tracing, modules_in

import recompute as rc
from recompute.testing import check_invariants
from recompute.testing._vectors import vector

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

LONG = 60  # seconds: only a deadlock takes as long
STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "0"))  # of the moments at which a fork comes; 0: few of them
MODULES = modules_in("recompute._engine", "recompute._policy", "recompute._recomputable")


@pytest.fixture(autouse=True)
def little_to_collect() -> Iterator[None]:
    """A child looks at what the test has made, and does not copy the pages of all else."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    assert gc.isenabled()


def fork() -> Fork:
    """`os.fork`, with a pipe to the parent, and a watchdog in the child."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONG)
    return Fork(process, reading, writing)


class Fork:
    """A process and the pipe from it, as both sides have it."""

    def __init__(self, process: int, reading: int, writing: int) -> None:
        self.process = process  # 0: this is the child
        self.reading = reading
        self.writing = writing

    def child(self, job: Callable[[], None]) -> None:
        """In the child: do it, say how that went, and end."""
        try:
            try:
                job()
                said = "fine"
            except BaseException:
                said = traceback.format_exc()
            os.write(self.writing, said.encode()[-60_000:])
        finally:
            os._exit(0)

    def parent(self) -> None:
        """In the parent: the child must have been fine."""
        os.close(self.writing)
        with os.fdopen(self.reading, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(self.process, 0)
        assert said == "fine", said or f"the child hung: it ended with status {status}"


def in_child(job: Callable[[], None]) -> None:
    """Do something in a child process."""
    forked = fork()
    if not forked.process:
        forked.child(job)
    forked.parent()


def add(*payloads: Any) -> Any:
    return vector(*(sum(each.numbers[0] for each in payloads) + number for number in range(2)))


class Program:
    """A chain of values in less memory than it takes; the same in every process."""

    def __init__(self, length: int = 10, budget: int = 100, **settings: Any) -> None:
        self.budget = budget
        self.cache = rc.Cache(budget, **settings)
        self.values: list[rc.Recomputable[Any]] = []
        with self.cache:
            self.values.append(rc.pure(vector(1, 2)))
            for number in range(length):
                self.values.append(rc.ap(add, self.values[-1], self.values[number // 2]))
        self.expected = [value.get().numbers for value in self.values]

    def work(self) -> None:
        """Gets, evictions, a pin, and new values."""
        for value in reversed(self.values):
            value.get()
        with self.cache:
            made = rc.ap(add, self.values[-1], self.values[4])
            self.values[6].pin()
            self.values[3].evict()
            self.values[5].evict()
            made.evict()
            made.get()
            self.values[6].unpin()
            one, other = rc.ap(lambda payload: (add(payload), add(payload, payload)), self.values[5], nout=2)
            one.evict()
            other.get()

    def check(self) -> None:
        """Everything is there, counted and free; the cache goes on."""
        assert gc.isenabled()
        self.make_room()
        check_invariants(self.cache, self.values)
        assert [value.get().numbers for value in self.values] == self.expected
        for value in self.values[1:]:
            value.evict()
        assert [value.get().numbers for value in reversed(self.values)] == self.expected[::-1]
        self.work()
        with self.cache:
            made = rc.ap(lambda: vector(7), nbytes=self.budget - 16)
            assert made.get() == vector(7)
        check_invariants(self.cache, [*self.values, made])

    def make_room(self) -> None:
        """Beyond what the threads of the parent had got or pinned: in the child nobody lets go of that any more."""
        for value in self.values:
            value.unpin()
        self.cache.budget = None
        self.cache.release_memory()
        self.cache.budget = self.budget + self.cache.stats().held

    def check_in_threads(self) -> None:
        """So it is for several threads at once."""
        self.make_room()
        threads = [Thread(target=self.work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
        self.check()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("policy", ["needed", "dtr-eq", "dtr", "lru"])
def test_forks_while_threads_use_the_cache(policy: Any, release: Any) -> None:
    """Whatever four threads are at, a child has all values, and its own threads work on."""
    program = Program(30, 260, policy=policy, release=release)
    errors: list[BaseException] = []
    busy, over = Event(), Event()

    def work() -> None:
        try:
            while not over.is_set():
                program.work()
                busy.set()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert busy.wait(LONG)
    try:
        for _ in range(4):
            in_child(program.check_in_threads)
    finally:
        over.set()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    assert errors == []
    program.check()


class Halting(Tracing):
    """Stops a thread at the n-th place in the engine, until it may go on."""

    def __init__(self) -> None:
        super().__init__(MODULES)
        self.there, self.go = Event(), Event()

    def halt(self) -> None:
        sys.settrace(None)
        self.there.set()
        assert self.go.wait(LONG)


def halted(program: Program, place: int, job: Callable[[], None]) -> int:
    """Run `job` in this thread while another one is stopped at a place in the engine; how many places there are."""
    halting = Halting()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with halting.on():
                program.work()
        except BaseException as error:
            errors.append(error)
        halting.there.set()

    halting.arm(place, strike=halting.halt)
    thread = Thread(target=work, daemon=True)
    thread.start()
    assert halting.there.wait(LONG)
    try:
        job()
    finally:
        halting.go.set()
        thread.join(LONG)
        assert not thread.is_alive()
    assert errors == []
    return halting.crossings


def some(places: int, count: int, first: int = 1) -> range:
    """About so many of the places, or every so-manieth if the environment says so."""
    return range(first, places, STRIDE or places // count)


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("policy", ["needed", "dtr-eq"])
def test_a_fork_at_any_moment_of_another_thread(policy: Any, release: Any) -> None:
    """Wherever in the engine another thread is, also with the lock, a child has all values and goes on at once."""
    program = Program(7, 80, policy=policy, release=release)
    places = halted(program, 0, lambda: None)
    assert places > 1000
    for place in some(places, 12, 1 + len(policy) + len(release)):
        halted(program, place, lambda: in_child(program.check))
    program.check()


def test_a_fork_leaves_the_collector_as_the_program_set_it() -> None:
    """That the collector pauses while another thread changes a cache is over in the child, used or not."""
    program = Program(7, 80)
    places = halted(program, 0, lambda: None)
    paused = 0

    def look() -> None:
        nonlocal paused
        paused += not gc.isenabled()
        in_child(enabled)

    def enabled() -> None:
        assert gc.isenabled()
        gc.disable()
        program.cache.stats()
        assert not gc.isenabled()

    for place in some(places, 20):
        halted(program, place, look)
    assert paused

    def disabled() -> None:
        assert not gc.isenabled()
        program.work()
        assert not gc.isenabled()

    gc.disable()
    try:
        in_child(disabled)
    finally:
        gc.enable()


def test_a_fork_with_several_caches() -> None:
    """Each cache of the child works, also those that no thread was at, and those that come later."""
    programs = [Program(7, 80), Program(7, 80, policy="lru"), Program(policy="dtr", release="banish")]

    def each() -> None:
        for program in programs:
            program.check()
        Program().check()

    places = halted(programs[0], 0, lambda: None)
    for place in some(places, 6, 20):
        halted(programs[0], place, lambda: in_child(each))
    for program in programs:
        program.check()


def test_a_fork_of_a_fork() -> None:
    """The child of a child goes on, too."""
    program = Program()

    def again() -> None:
        program.check()
        in_child(program.check)
        program.check()

    halted(program, 700, lambda: in_child(again))
    program.check()


def _raise(error: BaseException) -> None:
    raise error


class Forking:
    """Forks when it is called for the n-th time: two processes go on from there, and `end` is where both end."""

    def __init__(self, time: int) -> None:
        self.time = time
        self.calls = 0
        self.forked: Fork | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.time:
            self.forked = fork()

    def run(self, job: Callable[[], None], afterwards: Callable[[], None]) -> None:
        """Do both things: in two processes, if there is a fork in `job`."""

        def both() -> None:
            job()
            afterwards()

        try:
            job()
        except BaseException as error:
            if self.forked is not None and not self.forked.process:
                self.forked.child(partial(_raise, error))
            raise
        assert self.forked is not None, "there was no fork"
        if not self.forked.process:
            self.forked.child(afterwards)
        self.forked.parent()
        afterwards()


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize("pressure", [False, True])
def test_a_fork_inside_the_function_of_an_operation(time: int, pressure: bool) -> None:
    """Both processes finish the operation, and those that wait for it, each for itself."""
    program = Program()
    forking = Forking(time)
    made: list[rc.Recomputable[Any]] = []

    def inner(payload: Any) -> Any:
        forking()
        return add(payload, program.values[6].get())

    def outer(payload: Any) -> Any:
        return add(payload, made[0].get())

    def afterwards() -> None:
        assert [each.get().numbers[0] for each in made] == expected
        check_invariants(program.cache, [*program.values, *made])
        made.clear()
        program.check()

    numbers = [each[0] for each in program.expected]
    expected = [numbers[3] + numbers[6]]
    expected.append(numbers[2] + expected[0])
    expected.append(expected[1] + numbers[1])

    def job() -> None:
        with program.cache:
            made.append(rc.ap(inner, program.values[3]))
            made.append(rc.ap(outer, program.values[2]))
            made.append(rc.ap(add, made[1], program.values[1]))
            for each in made:
                each.evict()
            if pressure:
                program.work()
            assert made[2].get().numbers[0] == expected[2]

    forking.run(job, afterwards)


def test_a_fork_while_others_wait_for_the_operation() -> None:
    """A child waits for nobody, though in the parent threads wait for the value that is being made."""
    program = Program()
    forking = Forking(2)
    waiting: list[Thread] = []
    got: list[Any] = []

    def slow(payload: Any) -> Any:
        if forking.calls == 1:
            for _ in range(3):
                waiting.append(Thread(target=lambda: got.append(value.get().numbers[0]), daemon=True))
                waiting[-1].start()
            while len(program.cache.engine.scheduler.blocked) < 3:
                pass
        forking()
        return add(payload)

    with program.cache:
        value = rc.ap(slow, program.values[4])
    value.evict()

    def afterwards() -> None:
        assert value.get().numbers[0] == program.expected[4][0]
        assert forking.forked is not None
        if forking.forked.process:
            for thread in waiting:
                thread.join(LONG)
            assert got == [program.expected[4][0]] * 3
        value.evict()
        program.check()

    forking.run(value.get, afterwards)


def test_a_fork_while_another_thread_runs_functions() -> None:
    """What another thread was making is made anew in the child; room and locks that it had taken are free there."""
    program = Program()
    there, go = Event(), Event()
    parent = os.getpid()

    def slow(payload: Any) -> Any:
        if there.is_set() and os.getpid() == parent:
            assert go.wait(LONG)
        there.set()
        return add(payload)

    with program.cache:
        first = rc.ap(slow, program.values[4])
        second = rc.ap(add, first, program.values[5])
    first.evict()
    second.evict()
    thread = Thread(target=second.get, daemon=True)
    thread.start()

    def job() -> None:
        expected = program.expected[4][0]
        assert first.get().numbers[0] == expected
        assert second.get().numbers[0] == expected + program.expected[5][0]
        check_invariants(program.cache, [*program.values, first, second])
        first.evict()
        second.evict()
        program.check()

    try:
        while not program.cache.engine.scheduler.executing:
            pass
        in_child(job)
    finally:
        go.set()
        thread.join(LONG)
    job()


@pytest.mark.parametrize("where", ["budget", "score", "clock", "listener", "destructor"])
def test_a_fork_in_what_a_user_wrote(where: str) -> None:
    """Both processes go on from there, whatever called it."""
    forking = Forking(3)
    armed: list[bool] = []

    def budget(used: int) -> int:
        if armed and where == "budget":
            forking()
        return program.budget

    def score(cost: float, neighbours: float, size: int, staleness: float) -> float:
        if armed and where == "score":
            forking()
        return -size

    def clock() -> float:
        if armed and where == "clock":
            forking()
        return 0.0

    class Last:
        def __del__(self) -> None:
            forking()

    program = Program(policy=score, clock=clock)
    program.cache.budget = budget
    if where == "listener":
        program.cache.subscribe(lambda event: forking() if armed else None)

    def job() -> None:
        armed.append(True)
        program.work()
        if where == "destructor":
            with program.cache:
                for _ in range(3):
                    rc.ap(Last).evict()

    forking.run(job, program.check)
