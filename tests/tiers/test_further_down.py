"""A full tier passes what has not been used for long to the next one, and loses what is cheapest to lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from given_tiers import GivenTier, never

import recompute as rc
from recompute.testing import ManualClock, check_invariants

SIZE = 100


class Bytes:
    """So many bytes, as the cache counts."""

    def __init__(self, number: int) -> None:
        self.number = number


rc.register_size(Bytes, lambda value: SIZE)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@contextmanager
def warned(cache: rc.Cache, what: str) -> Iterator[rc.Cache]:
    """A block that must warn."""
    with pytest.warns(RuntimeWarning, match=what):  # noqa: SIM117
        with cache:
            yield cache


Fails = Callable[[int], Exception | None]


def below(clock: ManualClock, fast: int, *, read: Fails = never, write: Fails = never) -> list[GivenTier]:
    """A fast tier for `fast` values, whose reads may fail, and a slow one for any number, whose writes may."""
    return [
        GivenTier(fast * SIZE, latency=0.01, clock=clock, fail_read=read),
        GivenTier(latency=0.1, clock=clock, fail_write=write),
    ]


def sources(clock: ManualClock, count: int) -> list[rc.Recomputable[Bytes]]:
    """One after the other, a second apart."""
    made = []
    for number in range(count):
        clock.advance(1.0)
        made.append(rc.ap(waited, clock, number).detach())
    return made


def waited(clock: ManualClock, number: int) -> Bytes:
    """Dear to make."""
    clock.advance(100.0)
    return Bytes(number)


def in_tiers(tiers: list[GivenTier]) -> list[int]:
    """How many copies each has."""
    return [len(tier.store.kept) for tier in tiers]


def test_the_stalest_sources_lie_lowest(clock: ManualClock) -> None:
    """What was used last is in memory, what was used before that in the fast tier, and the rest in the slow one."""
    tiers = below(clock, fast=3)
    with rc.Cache(2 * SIZE, tiers=tiers, clock=clock) as cache:
        made = sources(clock, 10)
        assert in_tiers(tiers) == [3, 5]
        assert made[7].get().number == 7
        assert tiers[1].store.reads == 0
        assert made[0].get().number == 0
        assert tiers[1].store.reads == 1
        assert [value.get().number for value in made] == list(range(10))
        check_invariants(cache, made)


def test_a_result_goes_down_if_it_is_dear(clock: ManualClock) -> None:
    """Its operation runs once, though the fast tier was full long ago."""
    tiers = below(clock, fast=2)
    with rc.Cache(2 * SIZE, tiers=tiers, clock=clock) as cache:
        made = [rc.ap(waited, clock, number) for number in range(8)]
        assert [value.get().number for value in made] == list(range(8))
        assert cache.stats().rematerializations == 0
        assert cache.stats().tiers[1].moves > 0
        check_invariants(cache, made)


def test_what_is_cheapest_to_lose_makes_room(clock: ManualClock) -> None:
    """In the last tier a copy of what is quickly made again gives way to what is dear."""

    def make(seconds: float, number: int) -> Bytes:
        clock.advance(seconds)
        return Bytes(number)

    (tier, _) = below(clock, fast=3)
    with rc.Cache(SIZE, tiers=[tier], clock=clock) as cache:
        made = [rc.ap(make, seconds, number) for number, seconds in enumerate((5.0, 1.0, 3.0, 50.0, 2.0))]
        assert [value.get().number for value in (made[0], made[2], made[3])] == [0, 2, 3]
        assert cache.stats().rematerializations == 0
        assert made[1].get().number == 1
        assert cache.stats().rematerializations == 1
        check_invariants(cache, made)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_slow_tier_that_fails(clock: ManualClock, number: int) -> None:
    """What cannot go down stays where it was, and what should take its place stays in memory, or goes elsewhere."""
    fails: Fails = lambda write: OSError(f"write {write}") if write >= number else None
    tiers = below(clock, fast=2, write=fails)
    with warned(rc.Cache(4 * SIZE, tiers=tiers, clock=clock), "write") as cache:
        made = sources(clock, 2 + (number - 1) + 4)
        with pytest.raises(rc.BudgetError):
            sources(clock, 1)
        check_invariants(cache, made)
        made.remove(next(value for value in made if value.resident))  # or nothing could come back: there is no room
        numbers = [value.get().number for value in made]
        assert sorted({*numbers}) == sorted(numbers)
        assert len(numbers) == 2 + (number - 1) + 3
        check_invariants(cache, made)
        del made
        assert in_tiers(tiers) == [0, 0]


def test_a_fast_tier_that_cannot_be_read(clock: ManualClock) -> None:
    """Then nothing goes down: a later read may work, and brings the value back."""
    fails: Fails = lambda read: OSError("not now") if read <= 2 else None
    tiers = below(clock, fast=2, read=fails)
    with warned(rc.Cache(2 * SIZE, tiers=tiers, clock=clock), "not now") as cache:
        made = sources(clock, 4)
        for number in range(4, 8):
            try:
                made += sources(clock, 1)
            except rc.BudgetError:
                check_invariants(cache, made)
            else:
                assert number > 0
        assert len({value.get().number for value in made[:4]}) == 4
        check_invariants(cache, made)


def test_what_is_forgotten_on_its_way_down_counts_nowhere(clock: ManualClock) -> None:
    """Even if all is counted again meanwhile, after an interrupt."""
    made: list[rc.Recomputable[Bytes]] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def forgotten(write: int) -> None:
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            rc.ap(interrupted)

    tiers = below(clock, fast=1, write=forgotten)
    with rc.Cache(SIZE, tiers=tiers, clock=clock) as cache:
        made += sources(clock, 2)
        made += sources(clock, 1)
        assert tiers[1].store.writes == 1
        made.clear()
        check_invariants(cache)
        assert [tier.used for tier in cache.stats().tiers] == [0, 0]


def test_the_copy_of_what_is_forgotten_counts_no_more(clock: ManualClock) -> None:
    """Even if something still holds it, such as a thread of the parent process that is not there after a fork."""
    tiers = below(clock, fast=1)
    with rc.Cache(SIZE, tiers=tiers, clock=clock) as cache:
        made = sources(clock, 3)
        copies = [value._node.copy for value in made]
        assert [tier.used for tier in cache.stats().tiers] == [SIZE, SIZE]
        made.clear()
        assert [tier.used for tier in cache.stats().tiers] == [0, 0]
        assert in_tiers(tiers) == [1, 1]
        del copies
        assert in_tiers(tiers) == [0, 0]
