"""A neural ODE (Chen and others, 2018) that tells digits apart: one layer, applied n times in small steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from _digits import UNSEEN, load
from _report import Advance

Weights = dict[str, Array]
Gradient = Callable[[Weights, Array, Array], Weights]
"""Of the loss, by the weights: from weights, images and digits."""

BATCH: Final = 64
WIDTH: Final = 32
STATE: Final = BATCH * WIDTH * 4
"""Bytes."""


def initial(seed: int = 0) -> Weights:
    """From 64 pixels to a state, from state to its change, from the last state to the scores of ten digits."""
    one, two, three = jax.random.split(jax.random.key(seed), 3)
    return {
        "first": jax.random.normal(one, (64, WIDTH)) / 8,
        "change": jax.random.normal(two, (WIDTH, WIDTH)) / WIDTH**0.5,
        "offset": jnp.zeros(WIDTH),
        "last": jax.random.normal(three, (WIDTH, 10)) / WIDTH**0.5,
    }


def scores(weights: Weights, images: Array, n: int, block: int = 1) -> Array:
    """Integrate x' = tanh(x W + b) from 0 to 1 in n steps of Euler's; of a block only the first state is kept."""

    def step(x: Array, _: None) -> tuple[Array, None]:
        return x + jnp.tanh(x @ weights["change"] + weights["offset"]) * (1 / n), None

    def steps(x: Array, _: None) -> tuple[Array, None]:
        return jax.lax.scan(step, x, length=block)

    body = step if block == 1 else jax.checkpoint(steps)
    x, _ = jax.lax.scan(body, images @ weights["first"], length=n // block)
    return x @ weights["last"]


def loss(weights: Weights, images: Array, digits: Array, n: int, block: int = 1) -> Array:
    """Mean cross-entropy."""
    found = scores(weights, images, n, block)
    losses: Array = optax.softmax_cross_entropy_with_integer_labels(found, digits)
    return losses.mean()


def gradient(n: int, block: int = 1) -> Gradient:
    """Of the loss, by the weights."""
    return jax.grad(partial(loss, n=n, block=block))


def train(n: int, slopes: Gradient, steps: int, advance: Advance) -> tuple[float, float]:
    """The share of unseen digits that are told before and after so many steps of Adam, with this gradient."""
    images, digits = load()
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(weights: Weights, state: optax.OptState, by: Weights) -> tuple[Weights, optax.OptState]:
        changes, state = optimizer.update(by, state, weights)
        return optax.apply_updates(weights, changes), state

    def right(weights: Weights) -> float:
        return float((scores(weights, images[:UNSEEN], n).argmax(1) == digits[:UNSEEN]).mean())

    weights = initial()
    state = optimizer.init(weights)
    before = right(weights)
    random = np.random.default_rng(1)
    for _ in range(steps):
        chosen = random.integers(UNSEEN, len(digits), BATCH)
        weights, state = update(weights, state, slopes(weights, images[chosen], digits[chosen]))
        advance(1, "training")
    return before, right(weights)
