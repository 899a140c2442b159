"""A fork at any moment: the child's caches work, hold what the parent's did, and wait for no thread of the parent's."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from threading import Barrier, Event, Thread
from typing import Any

import pytest

import recompute as rc
from interrupts import Tracing, enough, modules_in
from lib.vectors import Vector, VectorAdapter, vector
from recompute.testing import check_invariants
from recompute.testing.conformance import registered

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on this system"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

LONG = 60  # seconds: only a deadlock takes as long
STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "0"))  # of the moments at which a fork comes; 0: few of them
MODULES = modules_in("recompute._engine", "recompute._policy", "recompute._recomputable", "recompute._tiers")


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
    return vector(*(sum(payload.numbers[0] for payload in payloads) + number for number in range(2)))


class Device(VectorAdapter):
    """Vectors on a device that answers the process alone which has launched an operation there."""

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]]:
        mine = os.getpid()

        def seconds() -> float | None:
            if os.getpid() != mine:
                raise AssertionError("a device of the parent process was asked")
            return None

        return lambda: seconds


def test_a_child_asks_no_device_of_its_parents() -> None:
    """Costs that only the device will know stay what they are in a child process, which must not touch the device."""
    with registered(Device(), Vector), rc.Cache() as cache:
        x = rc.pure(vector(1, 2, device="gpu:0"))
        values = [x.map(partial(vector_of, number)) for number in range(3)]

        def job() -> None:
            assert cache.stats().operations == 3
            values[0].evict()
            assert values[0].get().numbers == (0, 2)
            check_invariants(cache, [x, *values])

        in_child(job)
        check_invariants(cache, [x, *values])


def vector_of(first: int, payload: Vector) -> Vector:
    return vector(first, 2, device="gpu:0")


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
@pytest.mark.parametrize(
    ("policy", "release"),
    [("needed", "eager"), ("needed", "ignore"), ("needed", "banish"), ("dtr-eq", "eager"), ("lru", "banish")],
)
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
    """Stops a thread at the n-th place in the engine, or in some modules, until it may go on."""

    def __init__(self, *modules: str) -> None:
        super().__init__(modules_in(*modules) if modules else MODULES)
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
    return range(min(first, places), places, STRIDE or max(1, places // count))


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("policy", ["needed", "dtr-eq"])
def test_a_fork_at_any_moment_of_another_thread(policy: Any, release: Any) -> None:
    """Wherever in the engine another thread is, also with the lock, a child has all values and goes on at once."""
    program = Program(7, 80, policy=policy, release=release)
    places = halted(program, 0, lambda: None)
    assert enough(places, 1000)
    for place in some(places, 12, 1 + len(policy) + len(release)):
        halted(program, place, lambda: in_child(program.check))
    program.check()


def test_the_collector_is_as_the_program_set_it() -> None:
    """Its switch belongs to the program: no change of a cache turns it, in another thread, and in a child neither."""
    program = Program(7, 80)
    places = halted(program, 0, lambda: None)

    def look() -> None:
        assert gc.isenabled()
        in_child(enabled)

    def enabled() -> None:
        assert gc.isenabled()
        gc.disable()
        program.cache.stats()
        assert not gc.isenabled()

    for place in some(places, 20):
        halted(program, place, look)

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

    def use() -> None:
        for program in programs:
            program.check()
        Program().check()

    places = halted(programs[0], 0, lambda: None)
    for place in some(places, 6, 20):
        halted(programs[0], place, lambda: in_child(use))
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
        assert [value.get().numbers[0] for value in made] == expected
        check_invariants(program.cache, [*program.values, *made])
        made.clear()
        program.check()

    numbers = [value[0] for value in program.expected]
    expected = [numbers[3] + numbers[6]]
    expected.append(numbers[2] + expected[0])
    expected.append(expected[1] + numbers[1])

    def job() -> None:
        with program.cache:
            made.append(rc.ap(inner, program.values[3]))
            made.append(rc.ap(outer, program.values[2]))
            made.append(rc.ap(add, made[1], program.values[1]))
            for value in made:
                value.evict()
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
            while len(program.cache._engine.scheduler.blocked) < 3:
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
        while not program.cache._engine.scheduler.executing:
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


# Tiers


class Moved(Program):
    """It keeps what it evicts in a tier, the source too."""

    def __init__(self, length: int = 7, budget: int = 80, *, tiers: list[Any]) -> None:
        super().__init__(length, budget, tiers=tiers)

    def work(self) -> None:
        self.values[0].evict()
        super().work()
        self.values[0].evict()

    def check(self) -> None:
        assert self.values[0].get().numbers == self.expected[0]  # the first that it does
        super().check()


def on_disk(place: Path, **settings: Any) -> list[Any]:
    return [rc.Disk(folder=place, always=True, **settings)]


def host_then_disk(place: Path) -> list[Any]:
    return [rc.Host(64, always=True), *on_disk(place)]


TIERS = [on_disk, host_then_disk]
Tiers = Callable[[Path], list[Any]]


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_at_any_moment_of_a_move(tiers: Tiers, tmp_path: Path) -> None:
    """Wherever another thread is that writes, fetches or moves further down, a child has all and waits for nobody."""
    program = Moved(tiers=tiers(tmp_path))
    places = halted(program, 0, lambda: None)
    assert enough(places, 1000)
    for place in some(places, 25):
        halted(program, place, lambda: in_child(program.check))
    program.check()


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_of_a_fork_has_what_was_moved(tiers: Tiers, tmp_path: Path) -> None:
    """The child of a child reads its own files, which stay when both others have let go of theirs."""
    program = Moved(tiers=tiers(tmp_path))
    hurry, gone = os.pipe()

    def grandchild() -> None:
        os.read(hurry, 1)
        program.check()

    def child() -> None:
        program.check()
        forked = fork()
        if not forked.process:
            forked.child(grandchild)
        program.values.clear()
        os.write(gone, b"x")
        forked.parent()

    program.values[0].evict()
    in_child(child)
    program.check()


def test_what_is_written_between_the_preparation_of_a_fork_and_the_fork() -> None:
    """The child has it: a hook of the program that came first runs last, and evicts a source."""
    told = script("""
        import os
        late = []
        os.register_at_fork(before=lambda: [act() for act in late])
        import recompute as rc

        with rc.Cache("2MB", tiers=[rc.Disk()]):
            source = rc.pure(bytes(10_000))
            late.append(source.evict)
            child = os.fork()
            if child == 0:
                late.clear()
                print(len(source.get()), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            print(len(source.get()))
    """)
    assert told == "10000\n10000\n"


def test_a_cache_that_is_made_between_the_preparation_of_a_fork_and_the_fork() -> None:
    """The child has what was moved there, though its parent has let go of it."""
    told = script("""
        import os
        late = []
        os.register_at_fork(before=lambda: [act() for act in late])
        import recompute as rc

        def evict():
            with rc.Cache("2MB", tiers=[rc.Disk()]):
                made.append(rc.pure(bytes(10_000)))
                made[0].evict()

        made = []
        with rc.Cache("2MB", tiers=[rc.Disk()]):
            late.append(evict)
            hurry, gone = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(hurry, 1)
                print(len(made[0].get()), flush=True)
                os._exit(0)
            made.clear()
            os.write(gone, b"x")
            os.waitpid(child, 0)
    """)
    assert told == "10000\n"


def test_a_fork_while_the_memory_of_a_result_is_given_up() -> None:
    """The child gives it up before it makes the result again, although the thread that was at that is not there."""
    parent, there, go = os.getpid(), Event(), Event()
    told: list[str] = []

    class Block:
        """Its memory lies elsewhere."""

    class Blocks(rc.adapters.Adapter):
        def watch(self, value: Any) -> None:
            """What is given up is not taken back."""

        def vacate(self, value: Any) -> None:
            told.append("given up")
            if os.getpid() == parent:
                there.set()
                assert go.wait(LONG)

    def make() -> Block:
        told.append("made")
        return Block()

    rc.adapters.register(Block, Blocks())
    with rc.Cache(1000) as cache:
        made = rc.ap(make)
        thread = Thread(target=made.evict, daemon=True)
        thread.start()
        assert there.wait(LONG)

        def job() -> None:
            told.clear()
            made.get()
            assert told == ["given up", "made"]
            check_invariants(cache, [made])

        try:
            in_child(job)
        finally:
            go.set()
            thread.join(LONG)


def script(code: str) -> str:
    """What a program prints, with the caches of no test around it."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", dedent(code)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


class Slow:
    """A value whose bytes another thread takes its time to write, or to make a value of again, in the parent."""

    parent = os.getpid()
    writing, reading, go = Event(), Event(), Event()

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        self.writing.set()
        self.wait()
        return unpacked, (self.number,)

    @classmethod
    def wait(cls) -> None:
        if os.getpid() == cls.parent:
            assert cls.go.wait(LONG)


def unpacked(number: int) -> Slow:
    Slow.reading.set()
    Slow.wait()
    return Slow(number)


rc.register_size(Slow, lambda value: 16)


@pytest.fixture
def slow() -> Iterator[type[Slow]]:
    for event in (Slow.writing, Slow.reading, Slow.go):
        event.clear()
    yield Slow
    Slow.go.set()


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_while_a_source_is_written(slow: type[Slow], tiers: Tiers, tmp_path: Path) -> None:
    """The child gets it at once, although the thread that writes it is not there."""
    with rc.Cache(1000, tiers=tiers(tmp_path)) as cache:
        source = rc.pure(Slow(7))
        thread = Thread(target=source.evict, daemon=True)
        thread.start()
        assert slow.writing.wait(LONG)

        def job() -> None:
            assert source.get().number == 7
            check_invariants(cache, [source])
            source.evict()
            assert source.get().number == 7

        in_child(job)
        slow.go.set()
        thread.join(LONG)
        job()


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_while_a_source_is_fetched(slow: type[Slow], tiers: Tiers, tmp_path: Path) -> None:
    """The child fetches it, although the thread that does so is not there."""
    with rc.Cache(1000, tiers=tiers(tmp_path)) as cache:
        source = rc.pure(Slow(7))
        slow.go.set()
        source.evict()
        slow.go.clear()
        thread = Thread(target=source.get, daemon=True)
        thread.start()
        assert slow.reading.wait(LONG)

        def job() -> None:
            assert source.get().number == 7
            check_invariants(cache, [source])

        in_child(job)
        slow.go.set()
        thread.join(LONG)
        job()


def test_two_threads_that_fork_at_once(tmp_path: Path) -> None:
    """Each child has its own files: whatever one thread has prepared, the fork of another leaves it alone.

    In a process of its own: libraries that others have imported may hold a lock from before our hook to the fork.
    """
    command = f"import pathlib, test_fork; test_fork.two_threads_that_fork_at_once(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def two_threads_that_fork_at_once(tmp_path: Path) -> None:
    program = Moved(tiers=on_disk(tmp_path))
    modules = "recompute._engine.forking", "recompute._tiers"

    def other(place: int) -> int:
        """Fork in this thread while another one is stopped at a place of its fork."""
        halting = Halting(*modules)
        failed: list[BaseException] = []

        def fork_there() -> None:
            try:
                with halting.on():
                    forked = fork()
                    sys.settrace(None)
                    if not forked.process:
                        forked.child(program.check)
                forked.parent()
            except BaseException as error:
                failed.append(error)
            halting.there.set()

        halting.arm(place, strike=halting.halt)
        thread = Thread(target=fork_there, daemon=True)
        thread.start()
        assert halting.there.wait(LONG)
        for value in program.values:
            value.evict()
        in_child(program.check)
        halting.go.set()
        thread.join(LONG)
        assert not thread.is_alive()
        assert failed == []
        return halting.crossings

    places = other(0)
    for place in some(places, 20):
        other(place)
    program.check()
    other_program = Moved(tiers=on_disk(tmp_path))  # which removes what children have left behind
    assert len(list(tmp_path.iterdir())) == 2
    other_program.check()


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_in_the_middle_of_a_transfer_of_the_same_thread(tiers: Tiers, tmp_path: Path) -> None:
    """Both processes finish it, each with a file, and a place in it, of its own."""
    tracing = Tracing(modules_in("recompute._tiers"))
    whole = bytes(range(256)) * 36_000

    def forked(place: int) -> None:
        forking = Forking(1)
        source = rc.pure(whole)

        def job() -> None:
            tracing.arm(place, strike=forking)
            with tracing.on():
                source.evict()
                got.append(source.get())

        def afterwards() -> None:
            assert got.pop() == whole
            source.evict()
            assert source.get() == whole
            check_invariants(cache, [source])

        got: list[bytes] = []
        if place:
            forking.run(job, afterwards)
        else:
            job()
            afterwards()

    with rc.Cache("100MB", tiers=tiers(tmp_path)) as cache:
        forked(0)
        places = tracing.crossings
        for place in some(places, 12):
            forked(place)


def test_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was moved there is copied for the child."""

    def no_links(*args: Any) -> None:
        raise PermissionError("there are no links here")

    program = Moved(tiers=on_disk(tmp_path))
    program.values[0].evict()
    monkeypatch.setattr(os, "link", no_links)
    hurry, gone = os.pipe()
    forked = fork()
    if not forked.process:

        def job() -> None:
            os.read(hurry, 1)
            program.check()

        forked.child(job)
    program.values.clear()
    os.write(gone, b"x")
    forked.parent()


def test_a_process_that_evicts_ahead_ends_at_once(tmp_path: Path) -> None:
    """A child waits for no thread, since the one that was writing is not there; its parent for what that is at."""
    told = script(f"""
        import os, signal, sys, threading
        import recompute as rc

        class Slow:
            def __reduce__(self):
                if threading.current_thread() is not threading.main_thread():
                    writing.set()
                    go.wait()
                return Slow, ()

        rc.register_size(Slow, lambda value: 1000)
        writing, go = threading.Event(), threading.Event()
        with rc.Cache(10_000, tiers=[rc.Disk(folder={str(tmp_path)!r}, ahead=True)]) as cache:
            sources = [rc.pure(Slow()) for _ in range(11)]
            writing.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                sys.exit()
            print(os.waitpid(child, 0)[1])
            signal.alarm(5)
            go.set()
    """)
    assert told == "0\n"


@pytest.mark.parametrize("tiers", TIERS)
def test_a_soak_of_threads_and_forks_with_tiers(tiers: Tiers, tmp_path: Path) -> None:
    """Threads that move values, and threads that fork, all at once: no child lacks anything, or waits."""
    program = Moved(20, 160, tiers=tiers(tmp_path))
    errors: list[BaseException] = []
    over = Event()
    start = Barrier(5)

    def guarded(job: Callable[[], None]) -> Thread:
        def run() -> None:
            try:
                start.wait(LONG)
                job()
            except BaseException as error:
                errors.append(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        return thread

    def work() -> None:
        while not over.is_set():
            program.work()

    def forks() -> None:
        for _ in range(10):
            in_child(program.check)

    workers = [guarded(work) for _ in range(3)]
    forkers = [guarded(forks) for _ in range(2)]
    for thread in forkers:
        thread.join(2 * LONG)
        assert not thread.is_alive()
    over.set()
    for thread in workers:
        thread.join(LONG)
        assert not thread.is_alive()
    assert errors == []
    program.check()


def test_a_fork_wherever_a_write_to_the_disk_is(tmp_path: Path) -> None:
    """The handler of a signal forks at each place in turn: the child writes to its own folder, and does not warn."""
    program = Moved(tiers=on_disk(tmp_path))
    tracing = Tracing(modules_in("recompute._tiers.disk"))

    def work() -> None:
        with program.cache, tracing.on():
            made = rc.ap(add, program.values[-1], program.values[4])
            made.evict()
            assert made.get().numbers

    tracing.arm(0)
    work()
    assert tracing.crossings > (10 if sys.version_info < (3, 14) else 5)  # later there are fewer in the same code
    for place in range(1, min(tracing.crossings, 40)):
        forking = Forking(1)
        tracing.arm(place, strike=forking)
        forking.run(work, program.check)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_at_any_moment_of_the_same_thread(tiers: Tiers, tmp_path: Path) -> None:
    """Wherever the handler of a signal forks, both processes finish what they are at, also a change, and go on."""
    program = Moved(tiers=tiers(tmp_path))
    tracing = Tracing(MODULES)

    def strike() -> None:
        forking()
        assert gc.isenabled()

    def work() -> None:
        with tracing.on():
            program.work()

    tracing.arm(0)
    work()
    work()
    for place in some(tracing.crossings // 4, 25):  # of both times; the first time it passes more places
        forking = Forking(1)
        tracing.arm(place, strike=strike)
        forking.run(work, program.check)


def test_a_child_does_not_wait_for_a_call_that_another_thread_was_making() -> None:
    """A memoized call that is under way in the parent is made anew in the child."""
    begun, over = Event(), Event()
    parent = os.getpid()

    @rc.memoize
    def function(number: int) -> int:
        if os.getpid() == parent:
            begun.set()
            over.wait(LONG)
        return number

    def work() -> None:
        with cache:
            function(1)

    def job() -> None:
        assert function(1).get() == 1
        assert function(1) is function(1)

    with rc.Cache() as cache:
        thread = Thread(target=work)
        thread.start()
        assert begun.wait(LONG)
        forked = fork()
        if not forked.process:
            forked.child(job)
        over.set()
        thread.join()
        assert function(1).get() == 1
    forked.parent()
