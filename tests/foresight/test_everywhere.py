"""Foresight wherever programs run: plain pipelines, loops over arrays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import recompute as rc
from recompute.extend import Settings

np = pytest.importorskip("numpy")

LAYERS = 10


def training(cache: rc.Cache, steps: int) -> tuple[list[float], list[str], list[int]]:
    """A network on wrapped arrays, trained: losses, and after each step what is foreseen and how much ran again."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((64, 16))
    losses: list[float] = []
    states: list[str] = []
    again: list[int] = []
    with cache:
        weights = [rc.array(draw.standard_normal((16, 16))) for _ in range(LAYERS)]
        for _ in range(steps):
            layers = [rc.array(x)]
            for weight in weights:
                layers.append(np.tanh(layers[-1] @ weight * 0.1))
            losses.append(float((layers[-1] ** 2).sum()))
            gradient: Any = layers[-1] * 2
            steps_of: list[Any] = []
            for weight in reversed(weights):
                made = layers.pop()
                gradient = gradient * (1 - made * made)
                steps_of.append(layers[-1].T @ gradient * 0.1)
                gradient = gradient @ weight.T * 0.1
            pairs = zip(weights, reversed(steps_of), strict=True)
            weights = [(weight - 0.001 * step).detach() for weight, step in pairs]
            del layers, gradient, steps_of, made, weight
            stats = cache.stats()
            states.append(stats.foresight)
            again.append(stats.rematerializations)
    return losses, states, again


@pytest.mark.filterwarnings("ignore::recompute.ThrashWarning")  # half of it is sources, so that it does
@pytest.mark.parametrize("share", [0.6, 0.5])
def test_a_loop_over_arrays_is_found_and_followed(share: float) -> None:
    """With transposed views of what is evicted, too; results are equal, and fewer operations run again."""
    clock = itertools.count()
    plain = rc.Cache()
    expected, _, _ = training(plain, 12)
    budget = int(share * plain.stats().peak)
    cache = rc.Cache(budget, clock=lambda: float(next(clock)), settings=Settings(effort=0.02, waits=True))
    losses, states, again = training(cache, 12)
    assert losses == expected
    assert cache.stats().peak <= budget + cache.stats().overshoot
    assert all(state.startswith("following") for state in states[-4:])
    assert 0 < again[-1] - again[-2] < (again[2] - again[1]) / 2


def test_a_loop_that_builds_up_is_no_round() -> None:
    """One operation over and over, whose results are all needed later, and all in turn: the policy decides as ever."""

    def recomputed(foresight: bool) -> tuple[int, str]:
        clock = itertools.count()
        cache = rc.Cache(
            240,
            foresight=foresight,
            clock=lambda: float(next(clock)),
            settings=Settings(effort=0.02, waits=True),
        )
        with cache:
            messages = [rc.ap(lambda: 0, nbytes=10)]
            for _ in range(300):
                messages.append(rc.ap(lambda message: message + 1, messages[-1], nbytes=10))
            for number in range(300, -1, -1):
                assert messages.pop().get() == number
        return cache.stats().rematerializations, cache.stats().foresight

    assert recomputed(True) == (recomputed(False)[0], "")
