"""An exception from the handler of a signal, at any moment: nothing is lost, nothing stays locked, results are right.

Python looks for signals where a function is entered, after calls, and where a loop begins anew. Each such place inside
the engine and the policies is one where an interrupt strikes here, deterministically (`Tracing`); so are the borders of
their functions (`Interrupts`), which strike in every thread; and there are real signals (`Storm`). What comes out is
compared with what `Identity` gives. INTERRUPT_STRIDE=1 strikes at all places instead of some.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any
from weakref import WeakSet

import pytest
from interrupts import Interrupts, Storm, Tracing, holders_in, modules_in

import recompute as rc
from recompute.testing import Identity, ManualClock, check_invariants
from recompute.testing.programs import (
    Apply,
    Budget,
    Detach,
    Drop,
    Evict,
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

STRIDE = int(os.environ.get("INTERRUPT_STRIDE", "0"))  # of the places at which one strikes; 0: each test's own
LONG = 60.0  # seconds: only a deadlock takes as long
MODULES = modules_in("recompute._engine", "recompute._policy", "recompute._recomputable")
BUDGET = 120  # of 344 bytes that the program takes without one


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
EXPECTED = run(PROGRAM, Identity)


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Python could not raise, since it struck in a destructor: nothing but interrupts may be among that."""
    found: list[Any] = []
    gc.collect()
    gc.freeze()  # what was there before need not be looked at
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append((args.exc_type, str(args.exc_value))))
    yield found
    gc.unfreeze()
    assert [each for each in found if not issubclass(each[0], ERRORS)] == []


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    """Every function of the modules, and every method of their classes, lets interrupts in."""
    wanted = Interrupts()
    names = {module.__name__ for module in MODULES}
    wanted.let_in(monkeypatch, holders_in(MODULES), lambda function, name: function.__module__ in names)
    yield wanted
    wanted.arm(0)


def strike_with(error: type[BaseException]) -> Callable[[], None]:
    def strike() -> None:
        raise error

    return strike


def delivered(cache: rc.Cache) -> None:
    """See to interrupts that a destructor could not raise: the next use of the cache does."""
    for _ in range(3):
        try:
            cache.stats()
        except ERRORS:
            continue
        return
    raise AssertionError("an interrupt is raised again and again")


def interrupted(interpreter: Interpreter, program: Program, interrupts: Interrupts | Storm) -> list[Observation]:
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


def check_all(cache: rc.Cache, interpreter: Interpreter, found: list[Observation], budget: int) -> None:
    """All is as the identity has it, what is counted is right, and nothing is locked or left behind."""
    delivered(cache)
    assert gc.isenabled()
    assert not cache.engine.lock._is_owned()  # type: ignore[attr-defined]  # an RLock has it
    check_invariants(cache, interpreter.roots)
    stats = cache.stats()
    assert stats.peak <= budget + stats.overshoot
    wrong = difference(EXPECTED, found + interpreter.finish())
    assert wrong is None, wrong
    check_invariants(cache, interpreter.roots)
    interpreter.__init__(rc, cache)  # type: ignore[misc]  # lets go of everything
    gc.collect()  # tracebacks
    while cache.release == "ignore" and cache.release_memory():
        pass
    assert cache.stats().used == 0
    assert not cache.engine.memory.storages
    cache.budget = budget
    with cache:
        assert rc.ap(bytes, 1, nbytes=budget).get() == b"\0"
    check_invariants(cache)
    assert gc.isenabled()


def strike_everywhere(
    interrupts: Interrupts, error: type[BaseException], stride: int, first: int, settings: dict[str, Any]
) -> int:
    """Run the program again and again, with an interrupt at another place each time; how often one struck."""

    def attempt(place: int) -> None:
        cache = rc.Cache(BUDGET, clock=ManualClock(), **settings)
        interpreter = Interpreter(rc, cache)
        interrupts.arm(place, strike_with(error))
        found = interrupted(interpreter, PROGRAM, interrupts)
        places.append(interrupts.crossings)
        interrupts.strikes_at = 0
        try:
            check_all(cache, interpreter, found, BUDGET)
        except Exception as wrong:
            wrong.add_note(f"{error.__name__} at {interrupts.where} ({place} of {places[0]}), {settings}")
            raise

    places: list[int] = []
    attempt(0)
    tried = range(first, places[0], STRIDE or stride)
    for place in tried:
        attempt(place)
    return len(tried)


CHOICES = [
    ("needed", "eager"),
    ("needed", "ignore"),
    ("needed", "banish"),
    ("dtr-eq", "eager"),
    ("dtr", "banish"),
    ("lru", "ignore"),
]


@pytest.mark.parametrize(("policy", "release"), CHOICES)
@pytest.mark.parametrize("error", ERRORS)
def test_where_python_looks_for_signals(error: type[BaseException], policy: str, release: str) -> None:
    """Wherever in the engine an exception of any class strikes, nothing is lost or locked, and all results are right."""
    assert strike_everywhere(Tracing(MODULES), error, 211, 1, {"policy": policy, "release": release}) > 10
