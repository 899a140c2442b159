"""An interrupt at any call inside the engine: results and books are right afterwards.

Python looks for signals when a function is entered and when it has returned, so that is where they strike here. Every
method of the engine is wrapped to do so at the n-th crossing: deterministic, unlike a timer, and safe, unlike a tracer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from interrupts import Interrupts

import recompute as rc
from recompute._engine.allocation import Allocation
from recompute._engine.engine import Engine
from recompute._engine.frames import Flight, Frame
from recompute._engine.memory import Pool
from recompute._engine.references import Lifetimes
from recompute._engine.results import Results
from recompute._engine.runs import Runs
from recompute._engine.scheduler import Turns
from recompute._policy.neighbourhoods import Components
from recompute._policy.search import Tournaments
from recompute.testing import check_invariants

PARTS = (Engine, Runs, Allocation, Turns, Results, Lifetimes, Pool, Frame, Flight, Tournaments, Components)
STRIDE = 5  # of the crossings at which an interrupt strikes; each test parameter takes other ones


def block(*parts: bytes) -> bytes:
    return bytes((sum(part[0] for part in parts) + 1) % 256 for _ in range(100))


def program(cache: rc.Cache, kept: list[rc.Recomputable[bytes]]) -> list[int]:
    """Operations, reads, evictions, pins and releases, in less memory than they want."""
    with cache:
        if not kept:
            kept.append(rc.pure(b"\x01"))
        for step in range(12):
            kept.append(rc.ap(block, kept[-1], kept[len(kept) // 2]))
            if step % 3 == 0:
                kept[step].get()
        kept[5].pin().evict()
        kept[5].unpin().evict()
        kept[8].detach()
        del kept[6]
        cache.release_memory(200)
        return [each.get()[0] for each in kept]


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    """Every method of the engine, but for those that repair it, lets interrupts in."""
    wanted = Interrupts()
    wanted.let_in(monkeypatch, PARTS, lambda method, name: not name.startswith("__") and name != "_recover")
    gc.freeze()  # a repair looks at every object of the process: at none of those that are there before the test
    yield wanted
    gc.unfreeze()
    wanted.arm(0)


@pytest.mark.parametrize("first", range(1, STRIDE + 1))
def test_an_interrupt_anywhere_leaves_right_books(first: int, interrupts: Interrupts) -> None:
    """Wherever an interrupt strikes, nothing stays locked, the books agree with what is there, and values are right."""
    interrupts.arm(0)
    program(rc.Cache(1000), [])
    struck = 0
    for crossing in range(first, interrupts.crossings, STRIDE):
        cache = rc.Cache(1000)
        kept: list[rc.Recomputable[bytes]] = []
        interrupts.arm(crossing)
        try:
            program(cache, kept)
        except KeyboardInterrupt:
            struck += 1
        interrupts.arm(0)
        assert not cache._lock.locked()
        try:
            cache.stats()
        except KeyboardInterrupt:  # one that a destructor could not raise
            struck += 1
        check_invariants(cache, kept)
        assert [each.get() for each in kept] == [each.get() for each in reversed(kept)][::-1]
        with cache:
            again = rc.ap(block, *kept[:2])
        assert again.get() == block(*(each.get() for each in kept[:2]))
        check_invariants(cache, [*kept, again])
    assert struck > 20


def test_many_references_that_go_after_an_interrupt_are_repaired_once() -> None:
    """Destructors leave the repair, which looks at every object of the process, to the next use of the cache."""
    with rc.Cache() as cache:
        kept = rc.ap(bytearray, 10)
        many = [rc.ap(bytearray, 5_000) for _ in range(10)]
        cache._interrupted = True
        many.clear()
        assert cache._interrupted
        assert cache.stats().used == rc.sizeof(kept.get())
        assert not cache._interrupted
        check_invariants(cache, [kept])
