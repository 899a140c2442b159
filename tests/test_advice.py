"""Advice behind its wall: what fails there is said once and ends it, and no operation of the program hears of it."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import recompute as rc
from recompute.events import Performed
from recompute.extend import Operation, Pool, Settings, Storage
from recompute.testing import ManualClock, check_invariants

CLOCK = ManualClock()
ROOM = 1000
ENDED = "advice on what the program does next has ended for this cache"


class Broken(Exception):
    """What advice raises."""


class Strange(Broken):
    """It cannot even be shown."""

    def __repr__(self) -> str:
        raise Broken


def broken(*_: Any) -> Any:
    raise Broken("of its own")


def silent(operation: Operation) -> None:
    """Advice without words."""


class Advice:
    """Says nothing, but for what is replaced."""

    def victims(self, pool: Pool, size: int) -> list[Storage]:
        return []

    def keeps(self, storage: Storage) -> bool:
        return False


def advice(**methods: Callable[..., Any]) -> Advice:
    made = Advice()
    vars(made).update(methods)
    return made


def step(x: int) -> int:
    CLOCK.advance(1.0)
    return x + 1


def same(x: int) -> int:
    return x


def work(cache: rc.Cache) -> None:
    """A round of a program that is short of memory, there and back; some values go on the way."""
    with cache:
        values = [rc.pure(0)]
        for _ in range(30):
            between = rc.ap(step, values[-1], nbytes=10)
            values.append(rc.ap(same, between, nbytes=100))
            del between
        assert values[10].pin().get() == 10
        values[10].unpin()
        assert [value.get() for value in reversed(values)] == list(range(30, -1, -1))
        check_invariants(cache, values)


def tell(cache: rc.Cache, before: Any, wanted: Any = None) -> None:
    cache.extend.before, cache.extend.wanted = before, wanted


WAYS: dict[str, Callable[[rc.Cache], object]] = {
    "before": lambda cache: tell(cache, broken),
    "wanted": lambda cache: tell(cache, None, broken),
    "pressed": lambda cache: setattr(cache._engine, "pressed", broken),
    "victims": lambda cache: cache.extend.advise(advice(victims=broken)),
    "victims that are none": lambda cache: cache.extend.advise(advice(victims=lambda pool, size: [None])),
    "keeps": lambda cache: cache.extend.advise(advice(keeps=broken)),
    "a listener that advises": lambda cache: (tell(cache, silent), cache.extend.listen(broken)),
}


def options(waits: bool) -> Settings:
    return Settings(effort=0.0005, waits=waits, warns=False)


def new_cache(*, foresight: bool = False) -> rc.Cache:
    return rc.Cache(ROOM, clock=CLOCK, foresight=foresight, settings=options(True))


@contextmanager
def one_message(match: str, where: str = __file__) -> Iterator[None]:
    """One warning, which points to the program."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        yield
    assert [(warning.category, warning.filename) for warning in caught] == [(RuntimeWarning, where)]


def asked(cache: rc.Cache) -> tuple[object, ...]:
    """Whoever is asked or told of what happens."""
    engine = cache._engine
    return engine.before, engine.wanted, engine.pressed, engine.memory.advice, *engine.journal.listeners


def has_ended(cache: rc.Cache) -> bool:
    return asked(cache) == (None,) * 4


@pytest.mark.parametrize("way", WAYS)
def test_advice_that_fails_ends(way: str) -> None:
    """Wherever it is asked: results are right, it is said once, and nobody asks again."""
    cache = new_cache()
    WAYS[way](cache)
    with one_message(ENDED):
        work(cache)
    assert has_ended(cache)
    work(cache)
    gc.collect()
    check_invariants(cache)
    assert cache.stats().peak <= ROOM


PARTS = ["begins", "wants", "finish", "__call__", "victims", "keeps", "look"]


@pytest.mark.parametrize(("marked", "method"), [(False, "Repetition"), *itertools.product((True, False), PARTS)])
def test_foresight_that_fails_ends(marked: bool, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part of it: rounds run on without, and `stats` says why."""
    from recompute._foresight import follower, planning, recording, rounds

    holders: dict[str, Any] = {
        "begins": rounds.Foresight,
        "wants": rounds.Foresight,
        "Repetition": rounds,
        "finish": recording.Recording,
        "__call__": recording.Recording,
        "victims": follower.Follower,
        "keeps": follower.Follower,
        "look": planning.Knowledge,
    }
    cache = new_cache(foresight=True)
    monkeypatch.setattr(holders[method], method, broken)
    with one_message(ENDED):
        for _ in range(6):
            if marked:
                with cache.iteration():
                    work(cache)
            else:
                work(cache)
    assert has_ended(cache)
    assert cache.stats().foresight.startswith("ended: Broken('of its own'), ")
    cache.next_iteration()
    cache.next_iteration(last=True)
    assert cache.stats().foresight.startswith("ended")
    check_invariants(cache)


@pytest.mark.parametrize("waits", [True, False])
def test_planning_that_fails_ends_foresight(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background, too: the program hears of it in its own thread, when the next round begins."""
    monkeypatch.setattr("recompute._foresight.planning.problem_of", broken)
    cache = rc.Cache(ROOM, clock=CLOCK, settings=options(waits))
    with one_message(ENDED):
        with cache.iteration():
            work(cache)
        for planning in cache._foresight._rounds._known._threads:  # type: ignore[union-attr]
            planning.wait()
        with cache.iteration():
            work(cache)
    assert has_ended(cache)
    check_invariants(cache)


def test_what_was_kept_on_advice_alone_goes_with_it() -> None:
    """Advice that kept a value and then fails keeps it no longer."""
    cache = rc.Cache(clock=CLOCK)
    keeps: list[Any] = [lambda storage: True]
    cache.extend.advise(advice(keeps=lambda storage: keeps[0](storage)))
    with cache:
        first = rc.ap(step, rc.pure(0), nbytes=100)
        second = rc.ap(step, first, nbytes=100)
        del first
        assert cache.stats().used >= 200
        keeps[0] = broken
        with one_message(ENDED):
            third = rc.ap(step, second, nbytes=100)
            del second
            cache.stats()
        assert third.get() == 3
    assert cache.stats().used < 200
    check_invariants(cache, [third])


def test_advice_that_only_names_what_cannot_go_is_not_asked_for_ever() -> None:
    """Victims that are locked, or not in memory, count as none, and the policy decides."""
    cache = new_cache()
    with cache:
        source = rc.pure(0)
        stays = rc.ap(step, source, nbytes=300).pin()
        gone = rc.ap(step, source, nbytes=100)
        gone.evict()
        useless = [stays._node.storage, gone._node.storage]
        cache.extend.advise(advice(victims=lambda pool, size: useless))
        values = [rc.ap(step, source, nbytes=100) for _ in range(20)]
        assert [value.get() for value in values] == [1] * 20
        check_invariants(cache, [source, stays, gone, *values])


def test_an_error_that_cannot_be_shown_is_named() -> None:
    """Its `repr` is the user's code, and so is that of a listener."""
    cache = new_cache()

    def strange(operation: Operation) -> None:
        raise Strange

    class Listener:
        def __repr__(self) -> str:
            raise Broken

        def __call__(self, event: rc.events.Event) -> None:
            raise Strange

    tell(cache, strange)
    with one_message(f"{ENDED}.*<Strange>"):
        work(cache)
    cache.subscribe(Listener())
    with one_message("<Listener> raised <Strange> and will hear no more events"):
        work(cache)
    assert not cache._engine.observed
    check_invariants(cache)


def test_a_listener_that_fails_ends_no_advice() -> None:
    """It hears no more; what is foreseen goes on."""
    cache = new_cache(foresight=True)
    cache.subscribe(broken)
    with one_message("will hear no more events"):
        for _ in range(6):
            with cache.iteration():
                work(cache)
    assert cache.stats().foresight.startswith("following")
    check_invariants(cache)


def test_a_look_for_thrashing_that_fails_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program goes on."""
    monkeypatch.setattr("recompute._engine.thrashing._message", broken)
    cache = rc.Cache(80, clock=CLOCK)
    with cache, one_message("repeats much, but what could not be found out: Broken"):
        values = [rc.pure(0)]
        for _ in range(100):
            values.append(rc.ap(step, values[-1], nbytes=8))
        for _ in range(2):
            assert [value.get() for value in reversed(values)] == list(range(100, -1, -1))
    check_invariants(cache, values)


class TimeLimit(Exception):
    """What the handler of a signal raises: an error like any other."""


def strike(*_: Any) -> Any:
    """A signal comes here."""
    signal.raise_signal(signal.SIGUSR1)
    return []


@pytest.fixture
def limit() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


STRIKES: dict[str, Callable[[rc.Cache], object]] = {
    "before": lambda cache: tell(cache, strike),
    "wanted": lambda cache: tell(cache, None, strike),
    "pressed": lambda cache: setattr(cache._engine, "pressed", strike),
    "victims": lambda cache: cache.extend.advise(advice(victims=strike)),
    "a listener": lambda cache: cache.subscribe(lambda event: strike() if type(event) is Performed else None),
}


@pytest.mark.parametrize("way", STRIKES)
@pytest.mark.usefixtures("limit")
def test_what_a_signal_raises_there_ends_the_request(way: str) -> None:
    """Of whatever class it is; the cache stays right, and the advice goes on."""
    cache = new_cache()
    STRIKES[way](cache)
    before = asked(cache)
    with pytest.raises(TimeLimit):
        work(cache)
    assert asked(cache) == before
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.collect()
    work(cache)
    check_invariants(cache)


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_there_passes(way: str) -> None:
    """KeyboardInterrupt leaves the cache right, and the advice as it was."""
    cache = new_cache()

    def interrupt(*_: Any) -> Any:
        if not once:
            once.append(True)
            raise KeyboardInterrupt
        return []

    once: list[bool] = []
    match way:
        case "before":
            tell(cache, interrupt)
        case "wanted":
            tell(cache, None, interrupt)
        case "pressed":
            cache._engine.pressed = interrupt
        case "keeps":
            cache.extend.advise(advice(keeps=interrupt))
        case "a listener that advises":
            cache.extend.listen(interrupt)
        case _:
            cache.extend.advise(advice(victims=interrupt))
    before = asked(cache)
    with pytest.raises(KeyboardInterrupt):
        work(cache)
    gc.collect()
    work(cache)
    assert asked(cache) == before
    check_invariants(cache)
