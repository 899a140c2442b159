"""Threads over one cache: right results, single flight, no deadlock, and functions run outside the lock."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import numpy as np
import pytest

import recompute as rc
from lib.vectors import Buffer, Vector, VectorAdapter, vector
from recompute.events import Accessed, Performed
from recompute.extend import BackgroundThread
from recompute.policies import POLICIES, SEARCHES
from recompute.testing import EventLog, check_invariants

pytestmark = pytest.mark.usefixtures("no_python_while_the_collector_is_off")

BUDGETS = (8_000, 12_000, 40_000)
_LONG = 60.0  # seconds: only a deadlock takes as long


def unit(*arguments: Any) -> int:
    return 1


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run the jobs in threads; their results, and the first error raised in any."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]
    return results


def wait(event: Event) -> None:
    assert event.wait(_LONG), "nobody came"


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("policy", ["dtr-eq", "dtr", "lru"])
def test_sixteen_threads_under_pressure(policy: str, release: Any) -> None:
    """Sixteen threads get random values of one graph, half of which fits: all results are right, no deadlock."""
    draw = random.Random(5)

    def combine(number: int, *payloads: Any) -> Any:
        return vector(number, sum(sum(payload.numbers) for payload in payloads) % 97)

    cache = rc.Cache(16 * 60, policy=policy, release=release)
    expected: list[tuple[int, int]] = []
    values: list[rc.Recomputable[Any]] = []
    with cache:
        for number in range(120):
            above = [draw.randrange(max(0, number - 8), number) for _ in range(min(2, number))]
            values.append(rc.ap(combine, number, *(values[place] for place in above), nbytes=16))
            expected.append((number, sum(sum(expected[place]) for place in above) % 97))
    start = Barrier(16)

    def work(seed: int) -> Callable[[], None]:
        def look() -> None:
            own = random.Random(seed)
            start.wait(_LONG)
            for _ in range(60):
                number = own.randrange(120)
                assert values[number].get().numbers == expected[number]
                if own.random() < 0.2:
                    values[own.randrange(120)].evict()

        return look

    together(*(work(seed) for seed in range(16)))
    check_invariants(cache, values)
    assert cache.stats().used <= 16 * 60


def test_a_value_needed_by_many_is_computed_once() -> None:
    """Single flight: sixteen threads want one evicted value while it is being computed, which happens once."""
    entered, go = Event(), Event()
    runs: list[int] = []

    def slow() -> Any:
        runs.append(1)
        if len(runs) == 2:
            entered.set()
            wait(go)
        return vector(7)

    cache = rc.Cache()
    with cache:
        y = rc.ap(slow)
    y.evict()
    started = Barrier(16)

    def late() -> Any:
        started.wait(_LONG)
        return y.get()

    def opener() -> None:
        started.wait(_LONG)
        go.set()

    def first() -> Any:
        return y.get()

    thread = Thread(target=first, daemon=True)
    thread.start()
    wait(entered)
    results = together(*[late] * 15, opener)
    thread.join(_LONG)
    assert not thread.is_alive()
    assert results[:15] == [vector(7)] * 15
    assert len(runs) == 2
    check_invariants(cache, [y])


def test_two_values_of_one_operation_are_computed_once() -> None:
    """Threads that want different outputs of the same operation share one run."""
    start = Barrier(2)
    runs: list[int] = []

    def both() -> Any:
        runs.append(1)
        return vector(1), vector(2)

    with rc.Cache() as cache:
        a, b = rc.ap(both, nout=2)
        a.evict()
        b.evict()

        def getter(value: rc.Recomputable[Any]) -> Callable[[], Any]:
            def get() -> Any:
                start.wait(_LONG)
                return value.get()

            return get

        assert together(getter(a), getter(b)) == [vector(1), vector(2)]
        assert len(runs) == 2
        check_invariants(cache, [a, b])


def test_operations_run_outside_the_lock() -> None:
    """While one function runs, other threads compute, get, evict and look at statistics."""
    entered, go = Event(), Event()

    def slow(payload: Any) -> Any:
        entered.set()
        wait(go)
        return payload

    cache = rc.Cache()
    with cache:
        x, other = rc.ap(vector, 1), rc.ap(vector, 2)

        def start() -> Any:
            return rc.ap(slow, x)

        kept: list[Any] = []
        thread = Thread(target=lambda: kept.append(start()), daemon=True)
        thread.start()
        wait(entered)
        assert not x.evict(), "an argument of a running function is locked"
        assert other.evict()
        assert other.get() == vector(2)
        assert rc.ap(unit, other).get() == 1
        assert cache.stats().used >= 16
        go.set()
        thread.join(_LONG)
        assert not thread.is_alive()
        assert kept[0].get() == vector(1)
        assert x.evict()
        check_invariants(cache, [x, other, *kept])


def test_two_functions_run_at_once() -> None:
    """Each waits, inside, for the other to be inside: no lock is held while functions run."""
    inside = Barrier(2)

    def meet(number: int) -> int:
        inside.wait(_LONG)
        return number

    cache = rc.Cache()

    def run(number: int) -> Callable[[], Any]:
        def work() -> Any:
            with cache:
                return rc.ap(meet, number)

        return work

    a, b = together(run(1), run(2))
    assert (a.get(), b.get()) == (1, 2)
    check_invariants(cache, [a, b])


def test_waiting_for_memory_that_another_thread_needs_now() -> None:
    """No room, because another thread's function runs: wait for it rather than fail."""
    entered, go = Event(), Event()

    def slow() -> int:
        entered.set()
        wait(go)
        return 1

    cache = rc.Cache(10)
    results: list[Any] = []

    def hold() -> None:
        with cache:
            results.append(rc.ap(slow, nbytes=8))

    def want() -> None:
        with cache:
            results.append(rc.ap(unit, nbytes=8))

    holder, wanter = Thread(target=hold, daemon=True), Thread(target=want, daemon=True)
    holder.start()
    wait(entered)
    wanter.start()
    while not cache._engine.scheduler.blocked and wanter.is_alive():
        pass
    go.set()
    for thread in (holder, wanter):
        thread.join(_LONG)
        assert not thread.is_alive()
    assert [result.get() for result in results] == [1, 1]
    assert sum(result.resident for result in results) == 1
    check_invariants(cache, results)


def test_memory_short_while_another_thread_is_between_two_steps() -> None:
    """A thread that runs no function yet, and does not wait, is waited for: it gives back what it has locked."""
    entered, go = Event(), Event()
    holder: list[Thread] = []

    def policy(cost: float, neighbourhood: float, memory: float, staleness: float) -> float:
        if threading.current_thread() in holder:
            entered.set()
            wait(go)
        return staleness

    cache = rc.Cache(10, policy=policy)
    results: list[Any] = []
    with cache:
        taken, other = rc.ap(unit, nbytes=4), rc.ap(unit, nbytes=4)

    def hold() -> None:
        with cache:
            results.append(rc.ap(unit, taken, nbytes=4))

    def want() -> None:
        with cache:
            results.append(rc.ap(unit, nbytes=8))

    holder.append(Thread(target=hold, daemon=True))
    wanter = Thread(target=want, daemon=True)
    holder[0].start()
    wait(entered)
    wanter.start()
    while not cache._engine.scheduler.blocked and wanter.is_alive():
        pass
    go.set()
    for thread in (*holder, wanter):
        thread.join(_LONG)
        assert not thread.is_alive()
    assert [result.get() for result in results] == [1, 1]
    check_invariants(cache, [taken, other, *results])


def test_listeners_hear_of_one_event_after_the_other() -> None:
    """In the order in which things happened, though the thread that tells of the first one takes its time."""
    entered, go, heard = Event(), Event(), []

    def listen(event: object) -> None:
        heard.append(("begins", event))
        if not entered.is_set():
            entered.set()
            wait(go)
        heard.append(("ends", event))

    cache = rc.Cache()
    cache.subscribe(listen)

    def first() -> None:
        with cache:
            rc.ap(unit, nbytes=1)

    slow = Thread(target=first, daemon=True)
    slow.start()
    wait(entered)
    with cache:
        value = rc.ap(unit, nbytes=2)
    assert value.get() == 1
    assert len(heard) == 1
    assert not cache.extend.settle()
    go.set()
    slow.join(_LONG)
    assert cache.extend.settle()
    assert [event for kind, event in heard if kind == "begins"] == [event for kind, event in heard if kind == "ends"]
    assert [kind for kind, _ in heard] == ["begins", "ends"] * (len(heard) // 2)
    assert [event.nbytes for _, event in heard[::2] if isinstance(event, Performed)] == [(1,), (2,)]
    assert any(isinstance(event, Accessed) for _, event in heard)


def test_two_threads_that_lock_each_other_out() -> None:
    """Room for one recomputation at a time: two that start together both finish."""
    for _ in range(30):
        cache = rc.Cache(4)
        with cache:
            chains = []
            for _ in range(2):
                a = rc.ap(unit, nbytes=1)
                b = rc.ap(unit, a, nbytes=1)
                chains.append((a, b, rc.ap(unit, a, b, nbytes=1)))
        start = Barrier(2)

        def getter(value: Any, start: Barrier = start) -> Callable[[], Any]:
            def get() -> Any:
                start.wait(_LONG)
                return value.get()

            return get

        for chain in chains:
            for value in chain:
                value.evict()
        assert together(*(getter(chain[2]) for chain in chains)) == [1, 1]
        check_invariants(cache, [value for chain in chains for value in chain])


def test_a_fault_wakes_those_who_wait() -> None:
    """The thread that computed fails; the one that waited computes it itself."""
    entered, go = Event(), Event()
    runs: list[int] = []

    def failing() -> Any:
        runs.append(1)
        if len(runs) == 2:
            entered.set()
            wait(go)
            raise ValueError("the second run")
        return vector(1)

    cache = rc.Cache()
    with cache:
        y = rc.ap(failing)
    y.evict()
    errors: list[BaseException] = []

    def first() -> None:
        try:
            y.get()
        except ValueError as error:
            errors.append(error)

    one = Thread(target=first, daemon=True)
    one.start()
    wait(entered)
    found: list[Any] = []
    two = Thread(target=lambda: found.append(y.get()), daemon=True)
    two.start()
    while not cache._engine.scheduler.blocked and two.is_alive():
        pass
    go.set()
    for thread in (one, two):
        thread.join(_LONG)
        assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the second run"]
    assert found == [vector(1)]
    assert len(runs) == 3
    check_invariants(cache, [y])


def test_handles_dropped_in_other_threads() -> None:
    """Values made in one thread and dropped in others are gone."""
    cache = rc.Cache()
    with cache:
        boxes = [[rc.ap(vector, number, place) for place in range(100)] for number in range(8)]
    together(*(box.clear for box in boxes))
    assert cache.stats().used == 0
    check_invariants(cache)


def test_an_error_that_is_handled_does_not_come_back() -> None:
    """Nor is it taken for an interrupt, if a value goes meanwhile and another thread holds the lock."""
    cache = rc.Cache()
    held, free = Event(), Event()

    def hold() -> None:
        with cache._engine.lock:
            held.set()
            assert free.wait(_LONG)

    with cache:
        value = rc.ap(np.ones, 1000)
        thread = Thread(target=hold)
        thread.start()
        assert held.wait(_LONG)
        try:
            raise KeyError
        except KeyError:
            del value
        free.set()
        thread.join()
        assert rc.ap(np.sum, np.ones(3)).get() == 3
    assert cache.stats().used == 0


def test_an_error_that_is_handled_does_not_come_out_of_an_event() -> None:
    """A cache is used while an error is handled, and another thread is telling a listener."""
    cache = rc.Cache()
    telling, free = Event(), Event()

    def listen(event: Any) -> None:
        if isinstance(event, Accessed) and not telling.is_set():
            telling.set()
            assert free.wait(_LONG)

    with cache:
        one, other = rc.pure(1), rc.pure(2)
        cache.subscribe(listen)
        thread = Thread(target=one.get)
        thread.start()
        assert telling.wait(_LONG)
        try:
            raise KeyError
        except KeyError:
            assert other.get() == 2
        finally:
            free.set()
            thread.join()


class Leaving(Vector):
    """A vector that another thread uses as it is evicted."""

    __slots__ = ()
    meanwhile: Callable[[], Any] | None = None

    def __reduce__(self) -> Any:
        return Leaving, (Buffer(self.buffer.numbers),)


class LeavingAdapter(VectorAdapter):
    def serves(self, cls: type) -> bool:
        return cls is Leaving

    def evicted(self, value: Any) -> None:
        meanwhile, Leaving.meanwhile = Leaving.meanwhile, None
        if meanwhile is not None:
            together(meanwhile)


def test_a_value_that_leaves_twice_at_the_same_time(tmp_path: Path) -> None:
    """What is taken back is what was held of one of the two: with the memory that a view of it shares."""
    rc.adapters.register(Leaving, LeavingAdapter())
    with rc.Cache(tiers=[rc.Disk(folder=tmp_path, always=True)]) as cache:
        value = rc.pure(Leaving(Buffer((1, 2, 3))))
        assert value.evict()  # written, so that it need not wait for that again
        kept = [value.get()]

        def get_and_evict() -> None:
            kept.append(value.get())
            value.evict()

        Leaving.meanwhile = get_and_evict
        value.evict()
        assert len({id(payload.buffer) for payload in kept}) == 2
        taken = value.get()
        assert taken in kept
        view = rc.ap(Leaving.view, value, 1)
        assert view.number == value.number  # they share memory
        assert cache.stats().used == 2 * 24
        check_invariants(cache, [value, view])


def test_each_thread_has_its_own_current_cache() -> None:
    """`with cache:` in one thread is nothing to another."""
    one, two = rc.Cache(), rc.Cache()
    both = Barrier(2)

    def within(cache: rc.Cache) -> Callable[[], bool]:
        def work() -> bool:
            with cache:
                both.wait(_LONG)
                return rc.current_cache() is cache

        return work

    assert together(within(one), within(two)) == [True, True]
    with one:
        assert together(rc.current_cache) == [rc.default_cache()]


def test_events_of_many_threads_arrive_once_each() -> None:
    """Sixteen threads' operations are all told, each once."""
    cache = rc.Cache()

    def work(number: int) -> Callable[[], Any]:
        def run() -> Any:
            with cache:
                return [rc.ap(vector, number, place) for place in range(50)]

        return run

    with EventLog(cache) as log:
        kept = together(*(work(number) for number in range(16)))
        assert len(log.performed("Vector")) + len(log.performed("vector")) == 800
        assert sorted(event.storages for event in log.performed()) == [(number,) for number in range(1, 801)]
    assert len(kept) == 16


def test_a_collector_run_inside_the_lock() -> None:
    """Handles in garbage cycles, which the collector finds at any moment, are seen to without a deadlock."""
    cache = rc.Cache(200)

    def churn() -> None:
        with cache:
            for number in range(300):
                cycle: list[Any] = [rc.ap(vector, number)]
                cycle.append(cycle)
                rc.ap(unit, cycle[0])

    def running() -> set[threading.Thread]:
        """What plans in the background may begin and end meanwhile."""
        return {thread for thread in threading.enumerate() if not isinstance(thread, BackgroundThread)}

    before = running()
    together(*[churn] * 4)
    assert running() == before
    import gc

    gc.collect()
    assert cache.stats().used == 0
    check_invariants(cache)


def test_a_destructor_does_not_write_what_another_thread_has_evicted(tmp_path: Path) -> None:
    """It may run in an event loop, and anywhere else: a transfer is for the thread that has made it necessary."""
    begun, go_on, writers = Event(), Event(), []

    class Slow:
        """Goes when the other thread may go on."""

        def __init__(self) -> None:
            self.parts = bytearray(10_000)

        def __del__(self) -> None:
            if threading.current_thread() is other:
                begun.set()
                go_on.wait(_LONG)

    class Noted:
        """Notes who writes it."""

        def __init__(self) -> None:
            self.parts = bytearray(10_000)

        def __reduce__(self) -> tuple[type, tuple[int]]:
            writers.append(threading.current_thread())
            return bytearray, (1,)

    with rc.Cache("1MB", tiers=rc.Disk(folder=tmp_path)) as cache:
        slow, noted, dropped = rc.ap(Slow), rc.pure(Noted()), rc.ap(bytearray, 10_000)
        other = Thread(target=cache.release_memory)
        other.start()
        assert begun.wait(_LONG)
        del dropped
        assert writers == []
        go_on.set()
        other.join()
        assert writers == [other]
        check_invariants(cache, [slow, noted])


def test_many_threads_that_ask_for_the_figures_while_others_compute() -> None:
    """What other threads are at may be looked at while they begin and end it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with rc.Cache(1_000_000) as cache:

        def work() -> None:
            with cache:
                for _ in range(150):
                    values = [rc.ap(bytearray, 100_000) for _ in range(3)]
                    assert cache.stats().used >= 0
                    del values

        try:
            together(*[work] * 24)
        finally:
            sys.setswitchinterval(before)
        check_invariants(cache)


def repeated(payload: bytes, *, size: int, also: rc.Recomputable[bytes] | None = None) -> bytes:
    """Its first byte so many times; what else it asks for on the way is an operation within this one."""
    if also is not None:
        also.get()
    return payload[:1] * size


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_in_threads(seed: int) -> None:
    """Nested gets, evictions, faults and other budgets, in little memory: what fits is right, and no thread hangs."""
    draw = random.Random(seed)
    cache = rc.Cache(draw.choice(BUDGETS), release=draw.choice(("eager", "ignore", "banish")))
    with cache:
        shared = [rc.ap(repeated, rc.pure(bytes([number])), size=300 * (number + 2)) for number in range(5)]

    def work(seed: int) -> None:
        draw = random.Random(seed)
        mine = list(enumerate(shared))
        with cache:
            for _ in range(60):
                expected, value = draw.choice(mine)
                try:
                    match draw.randrange(6):
                        case 0 | 1 | 2:
                            also = draw.choice((None, None, draw.choice(shared)))
                            new = rc.ap(partial(repeated, size=draw.choice((100, 500, 2000)), also=also), value)
                            mine = [*mine[-9:], (expected, new)]
                        case 3:
                            assert value.get()[0] == expected
                        case 4:
                            value.evict()
                        case 5:
                            cache.budget = draw.choice(BUDGETS)
                    with pytest.raises(ZeroDivisionError):
                        rc.ap(divmod, expected, 0)
                except rc.BudgetError:  # for this thread, with what others hold
                    continue

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        together(*[partial(work, 100 * seed + number) for number in range(draw.choice((2, 4, 8)))])
    finally:
        sys.setswitchinterval(before)
    check_invariants(cache, shared)


def uses_of_all_kinds(policy: str, search: str) -> None:
    """Programs that meet the kinds of values, of handles and of changes that there are."""
    with rc.Cache("20kB", policy=policy, search=search) as cache:
        for turn in range(200):
            start = rc.pure(np.arange(100.0))
            values = [start]
            for step in range(12):
                values.append(rc.ap(np.add, values[-1], step))
            rows = rc.ap(np.split, values[-1], 4)
            rc.ap(lambda parts: [part[::2] for part in parts], rows).get()
            mixed = rc.ap(lambda x: {"sum": x.sum(), "all": [x, "text", 1]}, values[3])
            mixed.get()
            rc.ap(bytearray, 500, nbytes=500).get()
            values[5].evict()
            values[5].get()
            values[0].get()
            with suppress(ZeroDivisionError):
                rc.ap(divmod, turn, 0)
            if turn % 20 == 0:
                cache.stats()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_line_of_python_runs_while_the_collector_is_off(policy: str, search: str) -> None:
    """The collector is switched off only while compiled code runs, see the fixture: another thread cannot see it."""
    uses_of_all_kinds(policy, search)
    assert gc.isenabled()


def test_the_switch_of_the_collector_is_left_alone() -> None:
    """Whatever threads do with a cache, the garbage collector stays as the program has set it."""
    over = threading.Event()

    def work() -> None:
        with rc.Cache(1_000):
            while not over.is_set():
                kept = [rc.ap(bytes, 100, nbytes=100) for _ in range(20)]
                kept[0].get()

    threads = [threading.Thread(target=work) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    wrong = 0
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            gc.disable()
            wrong += any(gc.isenabled() for _ in range(200))
            gc.enable()
            wrong += not all(gc.isenabled() for _ in range(200))
    finally:
        gc.enable()
        sys.setswitchinterval(interval)
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == 0
