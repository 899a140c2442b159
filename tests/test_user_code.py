"""What a user wrote never runs under the lock: it may use the cache, in any thread, and what it does there counts."""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Barrier, Event, Thread, current_thread
from typing import Any, ClassVar

import pytest

import recompute as rc
from interrupts import Tracing, modules_in
from lib.vectors import vector
from recompute import extend
from recompute._policy.formulas import Policy
from recompute.testing import ManualClock, check_invariants

pytestmark = pytest.mark.usefixtures("no_python_while_the_collector_is_off")

LONG = 60.0  # seconds: only a deadlock takes as long
STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "0"))  # of the places in the engine that are tried; 0: some of them
ROOM = 1000
ACTIONS = ("stats", "get", "evict", "pin", "ap", "pure", "detach", "release_memory", "budget", "drop")


class Scene:
    """A cache, some values in it, and a piece of user code that uses them wherever it is called: `act`.

    It notes every error, and whether another thread could have had the lock meanwhile.
    """

    def __init__(self, action: str, **settings: Any) -> None:
        self.action = action
        self.used = 0  # times
        self.errors: list[BaseException] = []
        self._left = 0
        budget = settings.pop("budget", ROOM)
        self.limit = budget if isinstance(budget, int) else ROOM
        self.cache = rc.Cache(budget, **settings)
        with self.cache:
            self.values = [rc.ap(vector, number) for number in range(6)]
            self.values.append(rc.ap(add, *self.values[:2]))
        self.values[5].evict()

    def let(self, times: int = 4) -> None:
        """Act when asked to, so often."""
        self._left = times

    def act(self) -> None:
        if not self._left:
            return
        self._left -= 1
        self.used += 1
        try:
            assert self._free(), f"{self.action} was asked for under the lock"
            with self.cache:
                self._act()
        except BaseException as error:
            self.errors.append(error)

    def _free(self) -> bool:
        """Whether another thread can have the lock."""
        found: list[bool] = []

        def look() -> None:
            found.append(self.cache._engine.lock.acquire(timeout=LONG))
            if found[0]:
                self.cache._engine.lock.release()

        thread = Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    def _act(self) -> None:
        cache, values = self.cache, self.values
        match self.action:
            case "stats":
                assert cache.stats().used >= 0
            case "get":
                assert values[5].get() == vector(5)
            case "evict":
                values[0].evict()
                values[6].evict()
            case "pin":
                assert values[5].pin().get() == vector(5)
                values[5].unpin()
            case "ap":
                values.append(rc.ap(add, values[1], values[5]))
            case "pure":
                values.append(rc.pure(vector(9)))
            case "detach":
                assert values[4].detach().get() == vector(4)
            case "release_memory":
                cache.release_memory(8)
            case "budget":
                cache.budget = cache.budget
            case "drop":
                del values[6:]

    def check(self, *roots: Any, at_least: int = 1) -> None:
        """The user's code was called, did what it meant to, and all is right afterwards."""
        self._left = 0
        for error in self.errors:
            raise error
        assert self.used >= at_least, "the user's code was not called"
        gc.collect()
        check_invariants(self.cache, [*self.values, *roots])
        assert self.cache.stats().peak <= self.limit + self.cache.stats().overshoot
        for number in range(6):
            assert self.values[number].get() == vector(number)
        check_invariants(self.cache, [*self.values, *roots])
        assert gc.isenabled()


def add(*payloads: Any) -> Any:
    return vector(sum(sum(payload.numbers) for payload in payloads))


def shown(values: list[Any]) -> list[Any]:
    """What is in some values; the payloads themselves are not held."""
    return [value.get().numbers for value in values]


def peek(handle: Any) -> Callable[[Any], Any]:
    """A function that gets what it closes over."""
    return lambda payload: add(payload, handle.get())


def collect() -> None:
    """Collect garbage. While another thread does, `gc.collect` returns at once."""
    for _ in range(2):  # the first may be that thread's
        before = gc.get_stats()[2]["collections"]
        while gc.get_stats()[2]["collections"] == before:
            gc.collect()


class Loud:
    """A payload, an argument or a function that uses a cache when it is destroyed."""

    size = 200

    def __init__(self, scene: Scene, number: int = 0, cyclic: bool = False) -> None:
        self.scene = scene
        self.number = number
        self.me = self if cyclic else None

    def __call__(self, *payloads: Any) -> Any:
        return vector(self.number)

    def __del__(self) -> None:
        self.scene.act()


rc.register_size(Loud, lambda payload: payload.size)


@pytest.fixture(params=ACTIONS)
def action(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Budgets, scores, clocks, listeners


def test_a_budget_that_asks_the_cache() -> None:
    """A budget may be what the cache uses and some more."""
    cache = rc.Cache(budget=lambda used: cache.stats().used + 1000)
    with cache:
        values = [rc.ap(bytes, 300) for _ in range(10)]
    assert [value.get() for value in values] == [bytes(300)] * 10
    check_invariants(cache, values)


def in_a_thread(action: Callable[[], object]) -> None:
    """Do something in another thread, and wait for it; what it raises is raised here."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), "it waits for what waits for it"
    for error in errors:
        raise error


def test_a_budget_that_asks_the_cache_in_another_thread() -> None:
    """It may ask in a thread for which it waits; its last answer holds there."""

    def budget(used: int) -> int:
        asked.append(used)
        in_a_thread(lambda: cache.stats())
        if len(asked) > 1:
            in_a_thread(lambda: made.append(rc.ap(len, values[0]).get()))
        return ROOM

    asked: list[int] = []
    made: list[int] = []
    cache = rc.Cache(budget)
    values: list[Any] = []
    with cache:
        for _ in range(10):
            values.append(rc.ap(bytes, 300))
    assert [value.get() for value in values] == [bytes(300)] * 10
    assert len(asked) < 99
    assert made == [300] * (len(asked) - 1)
    check_invariants(cache, values)


def test_a_budget_that_waits_for_who_waits_for_it() -> None:
    """Before it has answered once, needing room in a thread for which it waits is an error that names it."""

    def make() -> int:
        with cache:
            return rc.ap(int, 8).get()

    def besieged(used: int) -> int:
        in_a_thread(make)
        return ROOM

    cache = rc.Cache(besieged)
    with pytest.raises(RuntimeError, match=r"besieged.*let it answer"):
        make()
    cache.budget = ROOM
    check_invariants(cache, [])
    assert make() == 8


def test_a_budget_function_counts_for_results_of_unknown_size() -> None:
    """A budget function is asked before the first result of a function is kept, too."""
    functions: list[Callable[[], bytes]] = [lambda: bytes(301), lambda: bytes(302), lambda: bytes(303)]
    functions += [lambda: bytes(304), lambda: bytes(305), lambda: bytes(306)]
    with rc.Cache(lambda used: ROOM) as cache:
        values = [rc.ap(function) for function in functions]
        stats = cache.stats()
        assert stats.used <= ROOM
        assert stats.peak <= ROOM + stats.overshoot
        assert 0 < stats.overshoot <= sys.getsizeof(bytes(306))
        assert [len(value.get()) for value in values] == [301, 302, 303, 304, 305, 306]
    check_invariants(cache, values)


def test_a_budget_that_uses_the_cache(action: str) -> None:
    """A budget function may do anything with the cache, while it is asked how much there is."""

    def budget(used: int) -> int:
        scenes[0].act() if scenes else None
        return ROOM

    scenes: list[Scene] = []
    scene = Scene(action, budget=budget)
    scenes.append(scene)
    scene.let(20)
    with scene.cache:
        values = [rc.ap(vector, number, nbytes=400) for number in range(4)]
    assert shown(values) == [(0,), (1,), (2,), (3,)]
    scene.check(*values)


@pytest.mark.parametrize("search", ["exact", "sample", "ignore small", "batch"])
def test_a_score_that_uses_the_cache(action: str, search: Any) -> None:
    """A score function may do anything with the cache, also to the candidates that it scores."""

    def score(cost: float, neighbours: float, size: int, staleness: float) -> float:
        scenes[0].act() if scenes else None
        return -size

    scenes: list[Scene] = []
    scene = Scene(action, policy=score, search=search)
    scenes.append(scene)
    scene.let(20)
    with scene.cache:
        values = [rc.ap(vector, number, nbytes=400) for number in range(5)]
    assert shown(values) == [(0,), (1,), (2,), (3,), (4,)]
    scene.check(*values)


def test_a_policy_that_uses_the_cache(action: str) -> None:
    """So may every part of a policy that is a class of the user's."""

    class Own(Policy):
        name = "own"
        scenes: ClassVar[list[Scene]] = []

        def act(self) -> None:
            for scene in self.scenes:
                scene.act()

        def under(self, pressure: float) -> Policy:
            self.act()
            return self

        def line(self, cost: float, neighbours: float, size: int) -> Any:
            self.act()
            return 1.0, float(size)

        def score(self, cost: float, neighbours: float, size: int, staleness: float) -> float:
            self.act()
            return super().score(cost, neighbours, size, staleness)

    scene = Scene(action, policy=Own())
    Own.scenes.append(scene)
    scene.let(20)
    with scene.cache:
        values = [rc.ap(vector, number, nbytes=400) for number in range(5)]
    assert shown(values) == [(0,), (1,), (2,), (3,), (4,)]
    scene.check(*values)


@pytest.mark.parametrize("search", ["exact", "sample", "ignore small", "batch"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_score_that_needs_room(search: Any, kept: bool) -> None:
    """A score may make values in its own full cache: the default policy makes room for those."""

    def score(cost: float, neighbours: float, size: int, staleness: float) -> float:
        if made is not None and len(made) < 20:
            with cache:
                value = rc.ap(bytes, 300)
                assert value.get() == bytes(300)
                made.append(value if kept else None)
        return size

    made: list[Any] | None = None
    with rc.Cache(ROOM, policy=score, search=search) as cache:
        values = [rc.ap(bytes, 200 + number) for number in range(4)]
        made = []
        values += [rc.ap(bytes, 200 + number) for number in range(4, 8)]
        assert [len(value.get()) for value in values] == list(range(200, 208))
    assert made
    check_invariants(cache, [*values, *(value for value in made if value is not None)])
    assert cache.stats().peak <= ROOM + cache.stats().overshoot


@pytest.mark.parametrize("where", ["score", "budget", "score of a release"])
def test_code_that_brings_back_what_was_evicted(where: str) -> None:
    """Code that brings back, whenever it is asked, what was evicted for it, keeps no room from being made."""

    def bring() -> None:
        for value in wanted:
            value.get()

    def score(cost: float, neighbours: float, size: int, staleness: float) -> float:
        bring()
        return size

    def budget(used: int) -> int:
        bring()
        return ROOM

    wanted: list[Any] = []
    cache = rc.Cache(budget, policy="lru") if where == "budget" else rc.Cache(ROOM, policy=score)
    with cache:
        values = [rc.ap(bytes, 750).pin(), *(rc.ap(bytes, 1) for _ in range(2))]
        wanted += values[1:]
        if where == "score of a release":
            assert cache.release_memory(60) >= 60
        else:
            values.append(rc.ap(bytes, 80, nbytes=150))
        wanted.clear()
        assert [len(value.get()) for value in values[1:]] == [1, 1, 80][: len(values) - 1]
    check_invariants(cache, values)


def test_a_score_never_runs_under_the_lock_though_another_thread_takes_the_room() -> None:
    """Room that is there when a search begins, and is not when the lock is taken, is searched for without it."""
    takers: list[Callable[[], None]] = []

    def budget(used: int) -> int:
        if takers and used + 400 <= ROOM:
            taker = Thread(target=takers.pop())
            taker.start()
            taker.join(LONG)
            assert not taker.is_alive()
        return ROOM

    def score(cost: float, neighbours: float, size: int, staleness: float) -> float:
        scene.act()
        return -size

    def take() -> None:
        with scene.cache:
            values.append(rc.ap(vector, 7, nbytes=500))

    values: list[Any] = []
    scene = Scene("stats", budget=budget)
    scene = Scene("stats", budget=budget, policy=score)
    scene.let(20)
    takers.append(take)
    with scene.cache:
        values += [rc.ap(vector, number, nbytes=400) for number in range(3)]
    scene.check(*values)


def test_a_clock_that_uses_the_cache(action: str) -> None:
    """A clock may do anything with the cache."""

    def clock() -> float:
        scenes[0].act() if scenes else None
        ticks.append(1.0)
        return float(len(ticks))

    ticks: list[float] = []
    scenes: list[Scene] = []
    scene = Scene(action, clock=clock)
    scenes.append(scene)
    scene.let(20)
    with scene.cache:
        outer = rc.ap(lambda: add(scene.values[1].get(), scene.values[5].get()))
        values = [rc.ap(vector, number, nbytes=400) for number in range(4)]
    assert outer.get() == vector(6)
    assert shown(values) == [(0,), (1,), (2,), (3,)]
    scene.check(outer, *values)


def test_a_listener_that_uses_the_cache(action: str) -> None:
    """A listener may do anything with the cache, and hears of that, too."""
    scene = Scene(action)
    heard: list[Any] = []

    def listener(event: Any) -> None:
        heard.append(event)
        scene.act()

    stop = scene.cache.subscribe(listener)
    scene.let(20)
    with scene.cache:
        values = [rc.ap(vector, number, nbytes=400) for number in range(4)]
    assert shown(values) == [(0,), (1,), (2,), (3,)]
    stop()
    scene.check(*values)
    assert len(heard) > 8


NO_TIMES = (math.nan, math.inf, -math.inf, 10**400, None, "3", 1j, [1.0])


@pytest.mark.parametrize("broken", NO_TIMES, ids=lambda broken: repr(broken)[:9])
def test_a_clock_without_a_time_is_refused(broken: Any) -> None:
    """A clock that returns no finite number is an error at the first operation, by name; nothing is left of that."""

    def sundial() -> Any:
        return broken

    with rc.Cache(ROOM, clock=sundial) as cache:
        x = rc.pure(vector(1))
        with pytest.raises((TypeError, ValueError), match=r"sundial.*a clock returns finite seconds"):
            rc.ap(add, x)
        check_invariants(cache, [x])
        assert cache.stats().used == 8
        assert cache.stats().operations == 0


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("broken", NO_TIMES, ids=lambda broken: repr(broken)[:9])
@pytest.mark.parametrize("when", range(12))
def test_a_clock_that_breaks(broken: Any, when: int, tiers: bool) -> None:
    """A clock that returns no finite number later on makes an error there, under pressure too; all is as before."""
    readings: list[Any] = []

    def clock() -> Any:
        readings.append(broken if len(readings) == when + 4 else float(len(readings)))
        return readings[-1]

    cache = rc.Cache(48, clock=clock, tiers=[rc.Host("1MB")] if tiers else ())

    def program() -> None:
        with cache:
            if len(values) < 2:
                values.append(rc.ap(vector, len(values), 2))
                program()
            while len(values) < 5:
                values.append(rc.ap(peek(values[-2]), values[-1]))
            values[0].evict()
            assert shown(values) == [(0, 2), (1, 2), (5,), (8,), (13,)]

    values: list[Any] = []
    told: list[str] = []
    for _ in range(2):
        try:
            program()
        except (TypeError, ValueError) as error:
            told.append(str(error))
        check_invariants(cache, values)
    program()
    assert all("clock" in message for message in told)
    assert 0 < cache.stats().model_time < math.inf
    check_invariants(cache, values)


# Destructors


def test_a_payload_that_uses_the_cache_as_it_is_evicted(action: str) -> None:
    """The destructor of a payload may do anything with the cache that evicts it."""
    scene = Scene(action)
    scene.let()
    with scene.cache:
        loud = [rc.ap(Loud, scene, number) for number in range(9)]
        more = rc.ap(vector, 1, nbytes=700)
    loud[-1].get()
    loud[-1].evict()
    scene.check(*loud, more)
    assert [value.get().number for value in loud] == list(range(9))


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("needed", [False, True])
def test_a_payload_that_uses_the_cache_as_it_is_released(action: str, release: Any, needed: bool) -> None:
    """Nor does it matter whether it goes because nobody refers to it any more."""
    scene = Scene(action, release=release)
    scene.let()
    with scene.cache:
        loud = [rc.ap(Loud, scene, number) for number in range(3)]
        users = [rc.ap(lambda payload: vector(payload.number), value) for value in loud] if needed else []
        del loud
        more = rc.ap(vector, 1, nbytes=900)
    if needed:
        users[1].evict()
        assert users[1].get() == vector(1)
    scene.check(*users, more)


def test_a_source_that_uses_the_cache_as_it_goes(action: str) -> None:
    """The destructor of a source is called when its last reference has gone, or what was made from it."""
    scene = Scene(action)
    scene.let()
    with scene.cache:
        source = rc.pure(Loud(scene))
        made = rc.ap(lambda payload: vector(payload.number), source)
        del source
        assert not scene.used
        del made
    scene.check()


def test_several_outputs_that_use_the_cache_as_they_go(action: str) -> None:
    """Each of several outputs has its destructor called when it goes, the last one takes the operation with it."""
    scene = Scene(action)
    scene.let(8)
    with scene.cache:
        one, other, third = rc.ap(lambda: (Loud(scene, 1), Loud(scene, 2), vector(3)), nout=3)
        one.evict()
        assert one.get().number == 1
        del one
        third.evict()
        assert third.get() == vector(3)
        other.evict()
        del other
        scene.check(third, at_least=3)


def test_aliases_that_use_the_cache_as_they_go(action: str) -> None:
    """So it is with values that share their memory."""
    scene = Scene(action)
    scene.let(8)
    with scene.cache:
        one = rc.ap(Loud, scene, 1)
        other = rc.ap(lambda payload: payload, one)
        third = rc.ap(lambda payload: payload, other)
        del one
        other.evict()
        assert third.get().number == 1
        del other
        third.evict()
        scene.check(third)
        assert third.get().number == 1


@pytest.mark.parametrize("where", ["function", "closure", "argument", "keyword", "list", "default"])
@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_a_recipe_that_uses_the_cache_as_it_goes(action: str, where: str, release: Any) -> None:
    """What an operation holds besides values may have destructors: its function, arguments, and what is in these."""
    scene = Scene(action, release=release)
    scene.let()
    loud: Any = Loud(scene, 3)

    def function(*parts: Any, **named: Any) -> Any:
        return vector(3)

    def make(loud: Any) -> Any:
        return lambda *parts: vector(loud.number)

    def given(payload: Any, loud: Any = loud) -> Any:
        return vector(loud.number)

    with scene.cache:
        x = scene.values[1]
        match where:
            case "function":
                y = rc.ap(loud, x)
            case "closure":
                y = rc.ap(make(loud), x)
            case "argument":
                y = rc.ap(function, x, loud)
            case "keyword":
                y = rc.ap(function, x, key=loud)
            case "list":
                y = rc.ap(function, [x, (loud,)])
            case _:
                y = rc.ap(given, x)
        del loud, given
        z = rc.ap(add, y)
        y.evict()
        assert z.get() == vector(3)
        assert not scene.used
        del y, z
        while release == "ignore" and scene.cache.release_memory():
            pass  # what nobody needs stays there until its room is needed
    scene.check()


def test_a_recipe_that_uses_the_cache_as_a_value_is_detached(action: str) -> None:
    """A value that is detached lets go of its function and its arguments."""
    scene = Scene(action)
    scene.let()
    with scene.cache:
        y = rc.ap(Loud(scene, 3), scene.values[1])
        y.detach()
    scene.check(y)
    assert y.get() == vector(3)


@pytest.mark.parametrize("how", ["pressure", "request", "release", "source", "recipe"])
def test_a_cycle_that_the_collector_finds_in_the_engine(action: str, how: str) -> None:
    """The garbage collector may find payloads at any moment, also while the engine is in the middle of something."""
    scene = Scene(action)
    scene.let(30)
    before = gc.get_threshold()
    gc.collect()  # so that there is little, and the oldest objects are looked at, too
    gc.set_threshold(1, 1, 1)
    try:
        with scene.cache:
            kept = []
            for number in range(12):
                match how:
                    case "pressure":
                        kept.append(rc.ap(Loud, scene, number, True))
                    case "request":
                        kept.append(rc.ap(Loud, scene, number, True))
                        kept[-1].evict()
                    case "release":
                        rc.ap(Loud, scene, number, True)
                    case "source":
                        rc.pure(Loud(scene, number, True))
                    case _:
                        rc.ap(Loud(scene, number, True), scene.values[1])
    finally:
        gc.set_threshold(*before)
    for number, value in enumerate(kept):
        assert value.get().number == number
        gc.collect()
    collect()  # those that are left
    scene.check(*kept)


def test_cycles_that_the_collector_finds_while_other_threads_change_other_caches() -> None:
    """That one cache has changed does not let the collector run in the middle of a change of another one."""
    scenes = [Scene("stats", budget=10**6) for _ in range(3)]
    errors: list[BaseException] = []

    def work(scene: Scene) -> None:
        try:
            for number in range(60):
                scene.let(1)
                with scene.cache:
                    Loud(scene, number, True)
                    assert rc.ap(Loud, scene, number, True).get().number == number
                    scene.values[number % 6].evict()
                    assert scene.values[number % 6].get() == vector(number % 6)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, args=[scene], daemon=True) for scene in scenes]
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*before)
    assert errors == []
    assert gc.isenabled()
    gc.collect()
    for scene in scenes:
        scene.check()


def test_what_a_caller_holds_uses_the_cache_as_he_lets_go(action: str) -> None:
    """A payload that was evicted while somebody held it has its destructor called when he lets go."""
    scene = Scene(action)
    scene.let()
    with scene.cache:
        y = rc.ap(Loud, scene, 1)
        held = y.get()
        y.evict()
        assert not scene.used
        assert scene.cache.stats().held == Loud.size
        del held
        assert scene.cache.stats().held == 0
        scene.check(y)


def test_what_a_caller_holds_may_go_at_any_moment() -> None:
    """Wherever the engine is as a thread lets go of a payload: should it hold the last reference, it has no lock."""

    def attempt(place: int) -> int:
        def let_go() -> None:
            held.clear()  # if the engine holds none, the destructor runs here, and does nothing
            scene.let()

        scene = Scene(ACTIONS[place % len(ACTIONS)])
        tracing = Tracing(modules)
        tracing.arm(place, strike=let_go)
        with scene.cache:
            y = rc.ap(Loud, scene, 1)
            held = [y.get()]
            y.evict()
            with tracing.on():
                y.pin()
                y.unpin()
                y.evict()
                made = rc.ap(lambda payload: vector(payload.number), y)
                y.evict()
                scene.cache.stats()
            assert y.get().number == 1
        scene.check(y, made, at_least=0)
        return tracing.crossings

    modules = modules_in("recompute._engine")
    places = attempt(0)
    for place in range(1, places, STRIDE or max(1, places // 50)):
        attempt(place)


def test_who_watches_a_payload_uses_the_cache_as_it_goes(action: str) -> None:
    """The callback of a weak reference to a payload is as good as a destructor."""
    scene = Scene(action)
    scene.let()

    class Plain:
        pass

    rc.register_size(Plain, lambda payload: 200)
    with scene.cache:
        y = rc.ap(Plain)
        watching = [weakref.ref(y.get(), lambda _: scene.act())]
        y.evict()
        watching.append(weakref.ref(y.get(), lambda _: scene.act()))
        more = rc.ap(vector, 1, nbytes=900)
    assert [reference() for reference in watching] == [None, None]
    scene.check(y, more, at_least=2)


def test_settings_that_use_the_cache_as_they_go(action: str) -> None:
    """A budget function and a listener may have destructors, too."""

    class Budget(Loud):
        def __call__(self, used: Any) -> Any:
            return ROOM

    scene = Scene(action)
    scene.let(8)
    scene.cache.budget = Budget(scene)
    with scene.cache:
        made = rc.ap(vector, 1)
    scene.let(8)
    scene.cache.budget = ROOM
    stop = scene.cache.subscribe(Loud(scene))
    with scene.cache:
        made = rc.ap(vector, 1)
    stop()
    del stop
    scene.check(made, at_least=2)


def test_what_is_written_over_uses_the_cache_as_it_goes(action: str) -> None:
    """An adapter may let a handle refer to what was written over its memory; the old payload goes."""
    scene = Scene(action)
    scene.let()
    with scene.cache:
        y = rc.ap(Loud, scene, 1)
        made = rc.ap(lambda payload: vector(payload.number), y)
        y.cache.extend.overwrite(y, rc.ap(Loud, scene, 2))
        assert y.get().number == 2
        made.evict()
        assert made.get() == vector(1)
    scene.check(y, made)


def test_payloads_that_hold_values_go_without_recursion() -> None:
    """A long chain of payloads, each of which holds the value before it, is dropped without running out of stack."""

    class Link:
        def __init__(self, value: Any) -> None:
            self.value = value

    rc.register_size(Link, lambda link: 8)
    with rc.Cache() as cache:
        last: Any = None
        for _ in range(5_000):
            last = rc.pure(Link(last))
        del last
        assert cache.stats().used == 0
        check_invariants(cache)


def test_values_that_go_where_the_stack_is_full() -> None:
    """What there is no stack for then is done by the next use of the cache, which does not fail because of it."""

    def deeper(cache: rc.Cache) -> None:
        value = rc.ap(bytearray, 1000)
        with suppress(RecursionError):
            deeper(cache)
        del value

    before = sys.getrecursionlimit()
    with rc.Cache("100MB") as cache:
        for limit in range(200, 300):
            try:
                sys.setrecursionlimit(limit)
                with suppress(RecursionError):
                    deeper(cache)
            finally:
                sys.setrecursionlimit(before)
            assert rc.ap(len, "abc").get() == 3
        gc.collect()
        assert cache.stats().used == 0
        check_invariants(cache)


def test_at_the_end_of_the_interpreter() -> None:
    """Destructors that use a cache as the interpreter ends do not keep it from ending, and complain of nothing."""
    script = """
import recompute as rc

class Loud:
    def __init__(self):
        self.used = Loud.used
        self.me = self

    def __del__(self):
        cache, one, other = self.used
        cache.stats()
        one.evict()
        assert other.get() == 8

rc.register_size(Loud, lambda payload: 400)
with rc.Cache(1000) as cache:
    Loud.used = cache, rc.ap(bytes, 10), rc.ap(len, b"12345678")
    loud = [rc.ap(Loud) for _ in range(5)]
    kept = rc.pure(Loud())
print(cache.stats().evictions)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 0


# Adapters

HOOKS = ("nbytes", "buffer", "watch", "device", "freeze", "enter", "evicted", "vacate", "restored", "signature")


@contextmanager
def suppress_own_result() -> Iterator[None]:
    """Nothing but the error that a value is needed for itself may come."""
    try:
        yield
    except RuntimeError as error:
        if "needs its own result" not in str(error):
            raise


class Curious:
    """A payload whose adapter uses the cache whenever it is asked something."""

    def __init__(self, number: int) -> None:
        self.number = number


class CuriousAdapter(rc.adapters.Adapter):
    """Uses a scene in one of its methods."""

    name = "curious"
    hook = ""
    scene: Scene | None = None
    dropped = False

    def act(self, hook: str) -> None:
        if self.scene is not None and hook == self.hook:
            self.scene.act()

    def nbytes(self, value: Any) -> int:
        self.act("nbytes")
        return 200

    def buffer(self, value: Any) -> object:
        self.act("buffer")
        return value

    def watch(self, value: Any) -> object:
        self.act("watch")
        return value

    def device(self, value: Any) -> str:
        self.act("device")
        return "cpu"

    def freeze(self, value: Any) -> None:
        self.act("freeze")

    def enter(self, value: Any) -> tuple[int, object]:
        self.act("enter")
        return 200, value

    def evicted(self, value: Any) -> Any:
        self.act("evicted")
        return Loud(self.scene) if self.scene is not None and self.hook == "outline" else value.number

    def vacate(self, value: Any) -> None:
        self.act("vacate")

    def restored(self, remains: Any, value: Any) -> None:
        self.act("restored")

    def signature(self, value: Any) -> Any:
        self.act("signature")
        return Curious

    def fingerprint(self, value: Any) -> bytes:
        self.act("fingerprint")
        return bytes([value.number])

    def timer(self, device: str) -> Any:
        self.act("timer")
        return None


class WithoutEnter(CuriousAdapter):
    """Is asked by `freeze`, `nbytes` and `buffer`."""

    enter = rc.adapters.Adapter.enter


@pytest.fixture
def adapter(request: pytest.FixtureRequest) -> Iterator[CuriousAdapter]:
    made = CuriousAdapter() if getattr(request, "param", "") in ("enter", "") else WithoutEnter()
    rc.adapters.register(Curious, made)
    yield made
    made.scene = None


def curious(*payloads: Any) -> Curious:
    return Curious(sum(payload.number for payload in payloads) + 1)


@pytest.mark.parametrize(("adapter", "hook"), [(hook, hook) for hook in (*HOOKS, "fingerprint")], indirect=["adapter"])
def test_an_adapter_that_uses_the_cache(adapter: CuriousAdapter, hook: str, action: str) -> None:
    """Whatever an adapter is asked, it may use the cache while it answers."""
    # with a manual clock: which of the many evictions within evictions there are does not depend on how long these took
    scene = adapter.scene = Scene(action, verify=hook == "fingerprint", clock=ManualClock())
    adapter.hook = hook
    scene.let(20)
    with scene.cache:
        values = [rc.pure(Curious(1))]
        for _ in range(8):
            values.append(rc.ap(curious, values[-1]))
        values[4].evict()
        values[5].evict()
        assert values[5].get().number == 6
        assert [value.get().number for value in values] == list(range(1, 10))
        scene.check(*values)


@pytest.mark.parametrize("hook", ["evicted", "vacate"])
def test_an_adapter_that_looks_at_the_cache_as_a_value_goes(adapter: CuriousAdapter, hook: str) -> None:
    """It is told of each eviction once, though what it does there settles what the cache has put aside."""
    cache = rc.Cache(ROOM)
    told: list[int] = []

    class Watching(CuriousAdapter):
        def act(self, hook: str) -> None:
            if hook == self.hook:
                told.append(cache.stats().evictions)

    watching = Watching()
    watching.hook = hook
    rc.adapters.register(Curious, watching)
    with cache:
        values = [rc.ap(Curious, number) for number in range(9)]
        assert [value.get().number for value in values] == list(range(9))
    check_invariants(cache, values)
    assert told == list(range(1, cache.stats().evictions + 1))


@pytest.mark.parametrize("what", ["ap", "pure", "release_memory"])
@pytest.mark.parametrize("hook", ["evicted", "vacate"])
def test_an_adapter_that_evicts_as_a_value_goes(adapter: CuriousAdapter, hook: str, what: str) -> None:
    """One that evicts each time it is told of an eviction is an error that names the type; nothing is lost."""

    class Evicting(CuriousAdapter):
        def act(self, hook: str) -> None:
            if hook == self.hook and cache is not None:
                with cache:
                    match what:
                        case "ap":
                            kept.append(rc.ap(Curious, -1))
                        case "pure":
                            kept.append(rc.pure(Curious(-1)))
                        case _:
                            assert isinstance(values[-1], rc.Recomputable)
                            cache.release_memory(1)

    kept: list[Any] = []
    cache: rc.Cache | None = None
    evicting = Evicting()
    evicting.hook = hook
    rc.adapters.register(Curious, evicting)
    with rc.Cache(200 * 99) as own:
        values = [rc.ap(Curious, number) for number in range(99)]
        cache = own
        with pytest.raises(RuntimeError, match=r"evicts values while it is told of an eviction.*Curious"):
            values.append(rc.ap(Curious, 99))
        cache = None
        kept.clear()
        assert [value.get().number for value in values] == list(range(99))
    check_invariants(own, values)


@pytest.mark.parametrize("room", [ROOM, 10 * ROOM], ids=["little", "enough"])
@pytest.mark.parametrize(("adapter", "hook"), [(hook, hook) for hook in (*HOOKS, "fingerprint")], indirect=["adapter"])
def test_an_adapter_that_asks_for_what_is_being_brought_back(adapter: CuriousAdapter, hook: str, room: int) -> None:
    """What an operation around the call is about to make again is made at once for who asks there, who would wait."""

    class Own(Scene):
        def _act(self) -> None:
            for number, value in enumerate(own):
                if hook not in ("watch", "evicted", "vacate"):
                    assert value.get().number == number + 1
                else:
                    with suppress_own_result():  # what leaves memory just now cannot be there
                        assert value.get().number == number + 1

    own: list[Any] = []
    scene = adapter.scene = Own("get", verify=hook == "fingerprint", budget=room)
    adapter.hook = hook
    short: list[BaseException] = []

    def work() -> None:
        with scene.cache:
            own.append(rc.pure(Curious(1)))
            for _ in range(8):
                own.append(rc.ap(curious, own[-1]))
            for value in own[2:]:
                value.evict()
            scene.let(20)
            try:
                assert [value.get().number for value in reversed(own)] == list(range(9, 0, -1))
                own.append(rc.ap(curious, own[-1]))
            except rc.BudgetError as error:  # results that are not stored yet are in memory, too, one in another
                short.append(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive(), "it waits for itself"
    if room == ROOM:
        scene.errors = [error for error in scene.errors if not isinstance(error, rc.BudgetError)]
    else:
        assert short == []
    scene.check(*own, at_least=room == ROOM)
    assert [value.get().number for value in own] == list(range(1, len(own) + 1))


def test_adapters_of_two_threads_that_ask_for_what_the_other_one_brings_back(adapter: CuriousAdapter) -> None:
    """Each thread asks, as it makes a value again, for what the other one makes: one of them makes that, too."""
    meet = Barrier(2, timeout=LONG)
    asks: dict[int, Any] = {}
    got: dict[int, int] = {}

    class Crossing(CuriousAdapter):
        def enter(self, value: Any) -> tuple[int, object]:
            wanted = asks.pop(value.number, None)
            if wanted is not None:
                meet.wait()
                got[value.number] = wanted.get().number
            return 200, value

    rc.adapters.register(Curious, Crossing())
    with rc.Cache() as cache:
        one, two = (rc.ap(Curious, number) for number in (1, 2))
        one.evict()
        two.evict()
        asks.update({1: two, 2: one})
        threads = [Thread(target=value.get, daemon=True) for value in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive(), "each waits for the other"
        assert got == {1: 2, 2: 1}
        assert (one.get().number, two.get().number) == (1, 2)
        check_invariants(cache, [one, two])


def test_an_adapter_of_the_thread_that_goes_first_uses_the_cache(adapter: CuriousAdapter) -> None:
    """The first thread that finds no room goes first, and what its adapters ask for meanwhile does not wait for it."""
    entered, go = Event(), Event()
    asks, got = [50], list[int]()

    class Using(CuriousAdapter):
        def evicted(self, value: Any) -> Any:
            if current_thread() is wanter and asks:
                asks.clear()  # what it asks for may evict something, too
                got.append(spare.get().number)
            return None

    def slow(payload: Any) -> Curious:
        entered.set()
        go.wait(LONG)
        return curious(payload)

    def within(function: Any, *values: Any, nbytes: int) -> None:
        with cache:
            results.append(rc.ap(function, *values, nbytes=nbytes))

    results: list[Any] = []
    with rc.Cache(800) as cache:
        spare, taken = rc.ap(Curious, 50), rc.ap(Curious, 1)
        spare.evict()
        rc.adapters.register(Curious, Using())
        holder = Thread(target=within, args=(slow, taken), kwargs={"nbytes": 200}, daemon=True)
        wanter = Thread(target=within, args=(vector, 7), kwargs={"nbytes": 600}, daemon=True)
        holder.start()
        entered.wait(LONG)
        wanter.start()
        while not cache._engine.scheduler.blocked and wanter.is_alive():
            pass
        go.set()
        for thread in (holder, wanter):
            thread.join(LONG)
            assert not thread.is_alive(), "it waits for itself to go first"
        assert got == [50]
        assert sorted(result.get().number for result in results if isinstance(result.get(), Curious)) == [2]
        check_invariants(cache, [spare, taken, *results])


class Asking:
    """Tells when it goes."""

    tell: ClassVar[list[Callable[[str], None]]] = []

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        for tell in self.tell:
            tell("destructor")


ASKED = ("watch", "evicted", "restored", "freeze", "signature", "destructor", "clock", "budget", "policy", "listener")


@pytest.mark.parametrize("where", ASKED)
def test_code_that_asks_for_whatever_threads_are_at(where: str) -> None:
    """Whichever code of the user's asks for whichever value, while threads share too little memory: none waits for
    ever, each gets what it asked for, or is told that the budget is short or that the value is on its way out."""
    local = threading.local()
    wrong: list[BaseException] = []

    class AskingAdapter(rc.adapters.Adapter):
        name = "asking"

        def nbytes(self, value: Any) -> int:
            return 200

        def buffer(self, value: Any) -> object:
            return value

        def watch(self, value: Any) -> object:
            ask("watch")
            return value

        def evicted(self, value: Any) -> Any:
            ask("evicted")
            return value.number

        def restored(self, remains: Any, value: Any) -> None:
            ask("restored")

        def freeze(self, value: Any) -> None:
            ask("freeze")

        def signature(self, value: Any) -> Any:
            ask("signature")
            return Asking

    def ask(here: str) -> None:
        depth = getattr(local, "depth", 0)
        if here == where and known and depth < deepest:  # else what it asks for would ask, and so on
            local.depth = depth + 1
            attempt(lambda: check(random.choice(known)))
            local.depth = depth

    def attempt(action: Callable[[], object]) -> None:
        try:
            with suppress(rc.BudgetError), suppress_own_result():
                action()
        except BaseException as error:
            wrong.append(error)

    def check(pair: tuple[Any, int]) -> None:
        assert pair[0].get().number == pair[1]

    def together(*payloads: Any) -> Asking:
        return Asking(sum(payload.number for payload in payloads) + 1)

    def clock() -> float:
        ask("clock")
        return time.perf_counter()

    def budget(used: int) -> int:
        ask("budget")
        return 1600

    def policy(cost: float, neighbourhood: float, memory: float, staleness: float) -> float:
        ask("policy")
        return cost / (memory * staleness + 1)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(15):
            pair = draw.choice(values)
            value = pair[0]
            match draw.randrange(3):
                case 0:
                    attempt(value.evict)
                case 1:
                    attempt(lambda pair=pair: check(pair))
                case _:
                    other = draw.choice(values)[0]
                    with cache:
                        attempt(lambda value=value, other=other: rc.ap(together, value, other))

    rc.adapters.register(Asking, AskingAdapter())
    Asking.tell[:] = [ask]
    known: list[tuple[Any, int]] = []
    for seed in range(15):
        draw = random.Random(seed)
        deepest = 1 if where == "listener" else draw.choice((1, 2, 4))  # each question makes many events
        settings: dict[str, Any] = {"policy": policy} if where == "policy" else {}
        settings |= {"clock": clock} if where == "clock" else {}
        limit = budget if where == "budget" else draw.choice((1000, 1600, 3000))
        settings["tiers"] = draw.choice(((), (rc.Host(2000),)))
        with rc.Cache(limit, release=draw.choice(("eager", "banish", "ignore")), **settings) as cache:
            cache.subscribe(lambda _: ask("listener"))
            values = [(rc.pure(Asking(1)), 1)]
            for _ in range(12):
                taken = [draw.choice(values) for _ in range(draw.choice((1, 1, 2)))]
                with suppress(rc.BudgetError):
                    made = rc.ap(together, *[value for value, _ in taken])
                    values.append((made, 1 + sum(number for _, number in taken)))
            known[:] = values
            threads = [Thread(target=work, args=[seed + 100 * number], daemon=True) for number in range(1 + seed % 3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
                assert not thread.is_alive(), "a thread waits for itself"
            known.clear()
            assert wrong == []
            check_invariants(cache, [value for value, _ in values])
    Asking.tell.clear()


def test_what_an_adapter_remembers_uses_the_cache_as_it_goes(adapter: CuriousAdapter, action: str) -> None:
    """What `evicted` said of a value may have a destructor; it goes with the value, or when that is back."""
    scene = adapter.scene = Scene(action)
    adapter.hook = "outline"
    with scene.cache:
        values = [rc.ap(Curious, number) for number in range(4)]
        for value in values:
            value.evict()
        scene.let()
        values[0].get()
        values[0].evict()
        extend.forget_outline(values[1]._node)
        del values[2]
        scene.check(*values)
        del values


def test_an_adapter_that_raises_as_several_values_go(adapter: CuriousAdapter, action: str) -> None:
    """An error of an adapter in the middle of an eviction passes through; the payloads go without the lock."""

    class Sulky(Loud):
        pass

    class Raising(CuriousAdapter):
        def evicted(self, value: Any) -> Any:
            raise OSError("no")

    rc.adapters.register(Sulky, Raising())
    scene = Scene(action)
    with scene.cache:
        one = rc.ap(Sulky, scene, 1)
        others = [rc.ap(lambda payload: payload, one) for _ in range(2)]
        apart, more = rc.ap(lambda: (Sulky(scene, 2), Sulky(scene, 3)), nout=2)
        scene.let()
        for value in (one, apart, more):
            with pytest.raises(OSError, match="no"):
                value.evict()
        assert [other.get().number for other in (one, *others, apart, more)] == [1, 1, 1, 2, 3]
    scene.check(one, *others, apart, more)


def test_a_value_is_not_brought_back_before_its_memory_is_given_up(adapter: CuriousAdapter) -> None:
    """A thread that needs a value whose memory an adapter is giving up waits; the adapter itself cannot."""
    threads: list[Thread] = []
    got: list[Any] = []

    class Slow(CuriousAdapter):
        def vacate(self, value: Any) -> None:
            if not threads:
                threads.append(Thread(target=lambda: got.append(y.get().number), daemon=True))
                threads[0].start()
                with pytest.raises(RuntimeError, match="its own result"):
                    y.get()
                assert got == []

    rc.adapters.register(Curious, Slow())
    with rc.Cache() as cache:
        y = rc.ap(Curious, 3)
        y.evict()
        threads[0].join(LONG)
        assert got == [3]
        check_invariants(cache, [y])


@pytest.mark.parametrize("what", ["expect", "size_key"])
def test_a_function_that_says_its_sizes_and_uses_the_cache(action: str, what: str) -> None:
    """So may a function that is asked how large its results will be."""
    scene = Scene(action)

    class Foreseen:
        def size_key(self) -> Any:
            if what == "size_key":
                scene.act()
            return Foreseen

        def expect(self, device: str) -> Any:
            if what == "expect":
                scene.act()
            return [(device, 8)]

        def __call__(self, *payloads: Any) -> Any:
            return add(*payloads)

    scene.let()
    with scene.cache:
        y = rc.ap(Foreseen(), scene.values[1])
        z = rc.ap(Foreseen(), y)
    assert z.get() == vector(1)
    scene.check(y, z)


def test_a_name_that_uses_the_cache(action: str) -> None:
    """Errors name functions, whose names may be code of the user's."""
    scene = Scene(action)

    class Named:
        def __init__(self) -> None:
            self.needs: list[Any] = []

        @property
        def __name__(self) -> str:
            scene.act()
            return "Named"

        def __call__(self, *payloads: Any) -> Any:
            return self.needs[0].get() if self.needs else vector(1)

    strange = Named()
    scene.let()
    with scene.cache:
        y = rc.ap(strange)
        z = rc.ap(Named(), y)
        z.evict()
        y.evict()
        strange.needs.append(z)
        with pytest.raises(RuntimeError, match=r"Named.* needs its own result"):
            z.get()
        strange.needs.clear()
        assert z.get() == vector(1)
        with pytest.raises(rc.BudgetError, match="Named"):
            rc.ap(Named(), nbytes=2 * ROOM)
    scene.check(y, z)


def test_a_name_is_not_asked_for_under_the_lock(action: str) -> None:
    """Where a cache tells what it does, or what is in memory, functions are named without code of the user's."""
    scene = Scene(action, log=100)

    class Nosy:
        def __getattr__(self, name: str) -> Any:
            if name in ("__qualname__", "__name__"):
                scene.act()
            raise AttributeError(name)

        def __call__(self, *payloads: Any) -> Any:
            return vector(1)

    scene.let()
    with scene.cache:
        y = rc.ap(Nosy())
        assert y.evict()
        assert y.get() == vector(1)
        with pytest.raises(rc.BudgetError, match="Nosy"):
            rc.ap(Nosy(), nbytes=2 * ROOM)
        assert {step.function.rpartition(".")[2] for step in y.story()} == {"Nosy"}
    assert any(held.function.endswith("Nosy") for held in scene.cache.memory())
    scene.check(y)


@pytest.mark.parametrize("where", ["payload", "function", "argument"])
def test_whatever_can_be_asked_of_an_object_may_use_the_cache(action: str, where: str) -> None:
    """Comparing, hashing, counting, and looking for attributes: none of it happens under the lock."""
    scene = Scene(action)

    class Nosy:
        def __init__(self, number: int) -> None:
            self.number = number

        def __eq__(self, other: object) -> bool:
            scene.act()
            return self is other

        def __hash__(self) -> int:
            scene.act()
            return 1

        def __bool__(self) -> bool:
            scene.act()
            return False

        def __len__(self) -> int:
            scene.act()
            return 0

        def __iter__(self) -> Any:
            scene.act()
            return iter(())

        def __repr__(self) -> str:
            scene.act()
            return "Nosy"

        def __getattr__(self, name: str) -> Any:
            scene.act()
            raise AttributeError(name)

        def __call__(self, *payloads: Any) -> Any:
            return vector(self.number)

    rc.register_size(Nosy, lambda payload: 200)
    scene.let(200)
    with scene.cache:
        match where:
            case "payload":
                values = [rc.ap(Nosy, number) for number in range(8)]
                outputs = rc.ap(lambda: (Nosy(1), Nosy(2)), nout=2)
                values += [rc.pure(Nosy(9)), *outputs]
            case "function":
                values = [rc.ap(Nosy(number), scene.values[0], nbytes=200) for number in range(8)]
            case _:
                values = [rc.ap(add, *scene.values[:2], nbytes=200)]
                values += [rc.ap(lambda *parts, key: vector(1), Nosy(1), [Nosy(2)], key=Nosy(3), nbytes=200)]
        for value in values:
            repr(value)
            value.evict()
            value.get()
        with pytest.raises(rc.BudgetError):
            rc.ap(Nosy(3), values[0], nbytes=2 * ROOM)
    scene.check(*values, at_least=0)
    del values
