"""What happens when the last reference goes: release modes, detach, aliases, what callers hold, and no leak."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from typing import Any

import pytest

import recompute as rc
from lib.vectors import vector
from recompute._engine.graph import Value
from recompute.testing import EventLog, check_invariants


def unit(*arguments: Any) -> int:
    return 1


def double(payload: Any) -> Any:
    return vector(*(2 * number for number in payload.numbers))


def itself(payload: Any) -> Any:
    return payload


def tail(payload: Any) -> Any:
    return payload.view(1)


def peek(handle: Any) -> Any:
    """A function that gets what it closes over."""
    return lambda: handle.get()


def alive() -> Counter[str]:
    """How many parts of graphs there are."""
    gc.collect()
    return Counter(type(tracked).__name__ for tracked in gc.get_objects() if type(tracked) is Value)


def test_eager_evicts_and_keeps_the_recipe() -> None:
    """Released, but something is made from it: the value goes at once, the recipe stays."""
    cache = rc.Cache(release="eager")
    with cache, EventLog(cache) as log:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        del x
        assert cache.stats().used == 1
        assert [event.why for event in log.evicted] == ["release"]
        assert (cache.stats().releases, cache.stats().evictions) == (1, 0)
        y.evict()
        assert y.get() == 1
        assert log.names(again=True) == ["unit", "unit"]


def test_eager_keeps_what_an_evicted_value_is_made_from() -> None:
    """Released while an evicted value that is needed is made from it, a value stays until that is back."""
    cache = rc.Cache(release="eager")
    with cache, EventLog(cache) as log:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        z = rc.ap(unit, y, nbytes=2)
        z.evict()
        del y
        assert cache.stats().used == 10 + 1
        x.evict()
        assert z.get() == 1
        assert log.names(again=True) == ["unit"]
        assert cache.stats().used == 2
        check_invariants(cache, [x, z])
        z.evict()
        assert z.get() == 1
        assert log.names(again=True) == ["unit"] * 4


def test_what_stays_for_an_evicted_value_goes_with_it() -> None:
    """When the evicted value is dropped, what stayed for it is forgotten; when it is evicted itself, it stays so."""
    cache = rc.Cache(release="eager")
    with cache:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        z = rc.ap(unit, y, nbytes=2)
        z.evict()
        del y
        assert cache.stats().used == 11
        del z
        assert cache.stats().used == 10
        check_invariants(cache, [x])
        y = rc.ap(unit, x, nbytes=1)
        z = rc.ap(unit, y, nbytes=2)
        z.evict()
        del y
        cache.release_memory()
        assert cache.stats().used == 0
        check_invariants(cache, [x, z])
        assert z.get() == 1
        check_invariants(cache, [x, z])


def test_ignore_leaves_it_to_the_policy() -> None:
    """Released values stay while there is room, and are forgotten when they are evicted."""
    cache = rc.Cache(release="ignore")
    with cache:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        del x
        assert cache.stats().used == 11
        z = rc.ap(unit, nbytes=5)
        del z
        assert cache.stats().used == 16
        check_invariants(cache, [y])
        cache.release_memory()
        assert cache.stats().used == 0
        check_invariants(cache, [y])
        assert y.get() == 1


def test_ignore_frees_all_that_can_go_at_once() -> None:
    """Also what stayed because of something that is forgotten meanwhile."""
    cache = rc.Cache(release="ignore")
    with cache:
        whole, part = rc.ap(lambda: (made := vector(1, 2, 3), made.view(1)), nout=2)
        users = [rc.ap(unit, whole), rc.ap(unit, part)]
        whole.detach()
        del whole, part, users
        cache.release_memory()
        assert cache.stats().used == 0
        check_invariants(cache)


def test_banish_makes_sources() -> None:
    """What nothing evicted needs is gone for good, and what was made from it cannot be evicted any more."""
    cache = rc.Cache(release="banish")
    with cache:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        del x
        assert cache.stats().used == 1
        assert "source" in repr(y)
        assert not y.evict()
        check_invariants(cache, [y])


def test_banish_waits_for_what_is_evicted() -> None:
    """As long as something evicted needs a value it stays; once that is back, it goes."""
    cache = rc.Cache(release="banish")
    with cache:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        y.evict()
        del x
        assert cache.stats().used in (0, 10)
        check_invariants(cache, [y])
        assert y.get() == 1
        assert cache.stats().used == 1
        assert "source" in repr(y)
        check_invariants(cache, [y])


def test_banish_still_waits_after_an_interrupt() -> None:
    """All is counted again after an interrupt; what was to be banished then is banished when nothing needs it."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    with rc.Cache(release="banish") as cache:
        x = rc.ap(unit, nbytes=10)
        y = rc.ap(unit, x, nbytes=1)
        y.evict()
        del x
        cache.stats()
        with pytest.raises(KeyboardInterrupt):
            rc.ap(interrupted)
        check_invariants(cache, [y])
        assert y.get() == 1
        assert cache.stats().used == 1
        assert "source" in repr(y)
        check_invariants(cache, [y])


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_a_detached_alias_goes_before_one_that_is_evicted(release: Any) -> None:
    """What is left on the storage is evicted, and comes back."""

    def windows() -> tuple[Any, Any]:
        whole = vector(1, 2, 3)
        return tail(whole), whole

    with rc.Cache(release=release) as cache:
        other, kept = rc.ap(windows, nout=2)
        held = kept.get()
        assert other.evict()
        kept.detach()
        check_invariants(cache, [other, kept])
        del kept, held
        check_invariants(cache, [other])
        assert other.get() == vector(2, 3)
        check_invariants(cache, [other])


def test_banish_with_aliases_in_a_row() -> None:
    """Banishing one value may leave another without a use: each is forgotten once."""
    cache = rc.Cache(release="banish")

    def second(first: Any, other: Any) -> Any:
        return double(other)

    with cache:
        v = rc.ap(vector, 1, 2, 3)
        alias = rc.ap(tail, v)
        w = rc.ap(double, alias)
        z = rc.ap(second, v, w)
        z.evict()
        del w, alias, v
        check_invariants(cache, [z])
        assert z.get() == vector(8, 12)
        check_invariants(cache, [z])
        del z
        assert cache.stats().used == 0
        check_invariants(cache)


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_detach_keeps_the_value_and_forgets_the_rest(release: Any) -> None:
    """A loop that detaches keeps one step of history; the value is a source."""
    before = alive()
    cache = rc.Cache(release=release)
    with cache:
        w = rc.pure(vector(1))
        for step in range(1000):
            if step % 3 == 0:
                w = rc.ap(double, w).detach()
            else:
                w = w.map(lambda payload: vector((payload.numbers[0] + 1) % 97)).detach()
        assert alive()["Value"] - before["Value"] <= 4
        assert not w.evict()
        assert w.detach() is w
        check_invariants(cache, [w])
    if release != "ignore":
        assert cache.stats().used == 8


def test_detach_of_an_evicted_value_brings_it_back() -> None:
    """Detach needs the value, so it recomputes it."""
    cache = rc.Cache()
    with cache, EventLog(cache) as log:
        x = rc.ap(vector, 1)
        y = rc.ap(double, x)
        y.evict()
        y.detach()
        assert log.names(again=True) == ["double"]
        del x
        assert cache.stats().used == 8
        assert y.get() == vector(2)
        check_invariants(cache, [y])


def test_aliases_are_counted_and_evicted_together() -> None:
    """A view shares its argument's storage: no bytes of its own, one eviction, one number."""
    cache = rc.Cache()
    with cache, EventLog(cache) as log:
        x = rc.ap(vector, 1, 2, 3)
        y = rc.ap(tail, x)
        z = rc.ap(itself, y)
        assert cache.stats().used == 24
        assert x.number == y.number == z.number
        assert z.evict()
        assert [x.resident, y.resident, z.resident] == [False] * 3
        assert len(log.evicted) == 1
        assert z.get() == vector(2, 3)
        assert cache.stats().used == 24
        assert log.names(again=True) == ["vector", "tail", "itself"]
        check_invariants(cache, [x, y, z])
        del x, y
        assert z.get() == vector(2, 3)
        assert cache.stats().used == 24
        check_invariants(cache, [z])


def test_a_view_of_a_source_is_never_evicted() -> None:
    """The memory is the source's."""
    with rc.Cache() as cache:
        x = rc.pure(vector(1, 2, 3))
        y = rc.ap(tail, x)
        assert not y.evict()
        assert cache.stats().used == 24
        check_invariants(cache, [x, y])


def test_two_views_of_one_fresh_buffer_share_a_storage() -> None:
    """Outputs that share memory with each other are evicted together."""

    def twins() -> tuple[Any, Any]:
        one = vector(1, 2, 3, 4)
        return one, one.view(2)

    with rc.Cache() as cache:
        a, b = rc.ap(twins, nout=2)
        assert a.number == b.number
        a.evict()
        assert not b.resident
        assert b.get() == vector(3, 4)
        assert a.resident
        check_invariants(cache, [a, b])


def test_what_a_caller_holds_counts_until_it_is_let_go() -> None:
    """Eviction cannot free what somebody holds: it stays counted as used, and then it does not."""
    cache = rc.Cache()
    with cache:
        y = rc.ap(vector, 1, 2, 3)
        payload = y.get()
        assert y.evict()
        assert not y.resident
        assert (cache.stats().used, cache.stats().held) == (24, 24)
        check_invariants(cache, [y])
        del payload
        assert (cache.stats().used, cache.stats().held) == (0, 0)
        check_invariants(cache, [y])


def test_what_a_caller_holds_is_taken_back_without_recomputation() -> None:
    """Needed again while somebody has it, it is the same object, and nothing ran."""
    cache = rc.Cache()
    with cache, EventLog(cache) as log:
        y = rc.ap(vector, 1, 2, 3)
        payload = y.get()
        y.evict()
        assert y.get() is payload
        assert log.names(again=True) == []
        assert cache.stats().recoveries == 1
        assert (cache.stats().used, cache.stats().held) == (24, 0)
        check_invariants(cache, [y])


def test_a_held_view_keeps_the_memory_counted() -> None:
    """It is the buffer that counts, not the object that was got."""
    cache = rc.Cache()
    with cache:
        y = rc.ap(vector, 1, 2, 3)
        z = rc.ap(tail, y)
        view = z.get()
        y.evict()
        assert cache.stats().held == 24
        assert y.get() == vector(1, 2, 3)
        assert z.get() == vector(2, 3)
        assert cache.stats().used in (24, 48)  # the view's buffer is another one if y was computed again
        check_invariants(cache, [y, z])
        del view
        assert cache.stats().used == 24
        check_invariants(cache, [y, z])


def test_what_is_held_takes_room() -> None:
    """Held bytes leave less for others, and the error says so."""
    cache = rc.Cache(30)
    with cache:
        y = rc.ap(vector, 1, 2, 3)
        payload = y.get()
        with pytest.raises(rc.BudgetError, match="held by the caller"):
            rc.ap(unit, nbytes=10)
        del payload
        assert rc.ap(unit, nbytes=10).get() == 1
        check_invariants(cache, [y])


def test_states_of_random_generators_are_not_said_to_be_held_by_the_caller() -> None:
    """They take room beside the values, and the error says so."""
    generator = random.Random(0)

    def draws() -> list[Any]:
        return [rc.ap(lambda: generator.random(), nbytes=10) for _ in range(10)]

    with rc.Cache(10_000) as cache, pytest.raises(rc.BudgetError) as caught:
        draws()
    assert "beside the values, such as states of random generators" in str(caught.value)
    assert "draw random numbers in fewer operations" in str(caught.value)
    assert "held by the caller" not in str(caught.value)
    check_invariants(cache)


def test_a_result_that_becomes_a_source_counts_once() -> None:
    """Memory that is held outside after its eviction, and is entered as a source, is no more than it was."""
    cache = rc.Cache(40)
    with cache:
        x = rc.ap(vector, 1, 2, 3)
        payload = x.get()
        x.evict()
        y = rc.pure(payload)
        assert (cache.stats().used, cache.stats().held) == (24, 0)
        check_invariants(cache, [x, y])
        del payload
        assert y.get() == vector(1, 2, 3)
        assert rc.ap(tail, y).get() == vector(2, 3)
        check_invariants(cache, [x, y])
        del y
        assert x.get() == vector(1, 2, 3)
        check_invariants(cache, [x])


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_a_steady_state_does_not_grow(release: Any) -> None:
    """Twenty thousand operations in a sliding window leave as many objects as two thousand."""
    cache = rc.Cache(400, release=release, foresight=False)  # what it knows of a round: see tests/foresight
    counts = []
    with cache:
        window = [rc.pure(vector(1))] * 10
        for step in range(20_001):
            if step and step % 20 == 0:
                window[0] = rc.pure(vector(step % 97))
            else:
                window.append(rc.ap(double, window.pop(0)))
            if step % 7 == 0:
                window[3].get()
            if step in (2_000, 20_000):
                window = [value.detach() for value in window]
                gc.collect()
                counts.append(len(gc.get_objects()))
    assert counts[1] <= counts[0] + 1000, counts
    del window
    check_invariants(cache) if release != "ignore" else None


def test_a_source_under_many_short_lived_users_does_not_grow() -> None:
    """A value that lives long forgets its dead users."""
    with rc.Cache():
        x = rc.pure(vector(1, 2))
        for _ in range(5000):
            rc.ap(double, x)
        assert len(list(x._node.each_user())) < 50


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_dropping_a_chain_leaves_nothing(release: Any) -> None:
    """When the last handle of a long chain goes, so do all values and recipes."""
    before = alive()
    cache = rc.Cache(release=release)
    with cache:
        y = rc.ap(vector, 1)
        for _ in range(5000):
            y = rc.ap(double, y) if release != "banish" else rc.ap(unit, y)
        del y
        cache.release_memory()
    assert cache.stats().used == 0
    assert alive() == before


def test_a_closure_over_a_handle_of_its_argument_is_no_cycle() -> None:
    """A dead operation holds nothing: not even through its function."""
    before = alive()
    cache = rc.Cache()
    with cache:
        x = rc.pure(vector(1))
        a = rc.ap(double, x)
        y = rc.ap(peek(x))
        del y, a, x
    assert cache.stats().used == 0
    assert alive() == before


def test_a_pin_ends_with_the_last_handle() -> None:
    """Nobody could unpin it any more."""
    cache = rc.Cache()
    with cache:
        x = rc.ap(unit, nbytes=10).pin()
        y = rc.ap(unit, x, nbytes=1)
        del x
        assert cache.stats().used == 1
        check_invariants(cache, [y])


def test_values_of_no_bytes() -> None:
    """None takes no room and is never a candidate, but it can be evicted, and it goes with its last handle."""
    modes: tuple[Any, ...] = ("eager", "ignore", "banish")
    for release in modes:
        cache = rc.Cache(release=release)
        with cache:
            x = rc.pure(vector(1))
            y = rc.ap(lambda payload: None, x)
            assert y.evict()
            assert y.get() is None
            del x, y
            assert cache.stats().used == 0
            check_invariants(cache)


def test_a_storage_whose_last_payload_goes_is_evicted() -> None:
    """Taken back through an alias that is then dropped, memory that nobody has is not counted."""
    with rc.Cache() as cache:
        x = rc.ap(vector, 1, 2, 3)
        y = rc.ap(tail, x)
        payload = y.get()
        y.evict()
        assert y.get() is payload
        del y, payload
        assert cache.stats().used == 0
        check_invariants(cache, [x])
        assert x.get() == vector(1, 2, 3)


def test_ignore_does_not_keep_what_can_no_longer_be_evicted() -> None:
    """An unreferenced alias whose storage becomes a source's goes with the source."""
    with rc.Cache(release="ignore") as cache:
        x = rc.ap(vector, 1)
        y = rc.ap(itself, x)
        del y
        x.detach()
        del x
        cache.release_memory()
        assert cache.stats().used == 0


def test_a_view_of_what_was_got_inside_is_an_alias() -> None:
    """A dependency found at run time is one for memory, too: already in the first run."""
    with rc.Cache() as cache:
        x = rc.ap(vector, 1, 2, 3)
        y = rc.ap(lambda: x.get().view(1))
        assert x.number == y.number
        assert cache.stats().used == 24
        check_invariants(cache, [x, y])


def test_sibling_views_count_the_same_after_recomputation() -> None:
    """What two views of one fresh buffer count does not depend on which run made them."""

    def twins() -> tuple[Any, Any]:
        one = vector(7, 5)
        return one.view(0, 1), one.view(1)

    with rc.Cache() as cache:
        a, b = rc.ap(twins, nout=2)
        before = cache.stats().used
        a.evict()
        a.get()
        assert cache.stats().used == before
        check_invariants(cache, [a, b])


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_what_an_operation_waits_for_is_not_forgotten(release: Any) -> None:
    """The last reference to an argument may go while it is made again: the operation that takes it gets it."""
    kept: list[rc.Recomputable[Any]] = []

    def double(x: int) -> int:
        if len(runs) == 1:
            kept.clear()
        runs.append(x)
        return 2 * x

    runs: list[int] = []
    with rc.Cache(release=release) as cache:
        x = rc.ap(lambda: 21)
        kept.append(rc.ap(double, x))
        kept[0].evict()
        node = kept[0]._node
        (handle,) = cache.extend.run(lambda y: y + 1, [node], [node], sys._getframe(), handle=rc.Recomputable)
        assert runs == [21, 21]
        handle.evict()
        assert handle.get() == 43
        del node
        check_invariants(cache, [x, handle])


@pytest.mark.parametrize("release", ["eager", "ignore", "banish"])
def test_a_first_run_that_fails_leaves_nothing_with_its_arguments(release: Any) -> None:
    """What it took is as it was before: with the last reference to it, it goes."""
    with rc.Cache(release=release) as cache:
        x = rc.ap(bytes, 1000)
        with pytest.raises(ZeroDivisionError):
            rc.ap(lambda x: 1 / 0, x)
        check_invariants(cache, [x])
        del x
        cache.release_memory()
        assert cache.stats().used == 0
        check_invariants(cache)
