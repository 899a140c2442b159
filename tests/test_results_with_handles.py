"""A function that returns a Recomputable, or something that contains one, is told what to return instead."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_invariants


@dataclasses.dataclass
class Box:
    content: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    content: Any


WRAPPERS: list[Callable[[Any], Any]] = [
    lambda x: [x],
    lambda x: (1, x),
    lambda x: {x},
    lambda x: frozenset([x]),
    lambda x: deque([x]),
    lambda x: {"a": x},
    lambda x: {x: 1},
    Box,
    Slotted,
]


def nest(handle: Any, layers: list[int]) -> Any:
    """The handle inside of some containers; of a set only what can be hashed."""
    for layer in layers:
        try:
            handle = WRAPPERS[layer](handle)
        except TypeError:  # what is in a set has to have a hash
            handle = [handle]
    return handle


@given(
    layers=st.lists(st.integers(0, len(WRAPPERS) - 1), max_size=4),
    wrapped=st.booleans(),
    verify=st.booleans(),
)
def test_a_handle_in_a_result(layers: list[int], wrapped: bool, verify: bool) -> None:
    """At any depth, in any container or object: a TypeError that names the function, the handle and the cure."""
    with rc.Cache(verify=verify) as cache:
        y: Any = rc.array(np.ones(3)) if wrapped else rc.ap(bytes, 100)

        def forgetful(number: int) -> Any:
            return nest(y, layers)

        with pytest.raises(TypeError, match=r"forgetful returned a .*<Recomputable.*return handle\.get\(\)"):
            rc.ap(forgetful, 1)
        with pytest.raises(TypeError, match="returned a "):
            rc.ap(lambda number: (forgetful(number), 1), 1, nout=2)
        with pytest.raises(TypeError, match=r"rc\.sequence"):
            rc.ap(forgetful, 1, nbytes=10)
        check_invariants(cache, [y])


def test_a_handle_in_a_repeated_run() -> None:
    """Also if the function returned a value the first time; the value can be had once it does so again."""
    with rc.Cache() as cache:
        y = rc.pure(5)
        answers: list[Any] = [1, [y], 1]
        z = rc.ap(lambda: answers.pop(0))
        z.evict()
        with pytest.raises(TypeError, match=r"lambda.* returned a list with a Recomputable in it"):
            z.get()
        assert z.get() == 1
        check_invariants(cache, [y, z])


def test_what_the_error_advises() -> None:
    """The value inside of the function, or the function itself with `sequence` of what it returns, both work."""
    with rc.Cache() as cache:
        x = rc.pure(3)
        inside = rc.ap(lambda: [rc.ap(str, x).get()])
        outside = rc.sequence([rc.ap(str, x)])
        assert inside.get() == outside.get() == ["3"]
        check_invariants(cache, [x, inside, outside])


def test_what_may_hold_a_handle() -> None:
    """Sources may, and a type whose size is registered, which nobody looks into."""

    class Mine:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

    rc.register_size(Mine, lambda mine: 8)
    with rc.Cache():
        x = rc.pure(3)
        assert rc.pure([x]).get() == [x]
        assert rc.ap(lambda: Mine(x)).get().handle is x
        assert rc.sizeof([x]) > 0
