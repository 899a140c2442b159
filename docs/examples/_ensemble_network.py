"""Convolutional networks that share a trunk: a TreeNet (Lee and others, Why M heads are better than one, 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from _digits import UNSEEN, load
from _report import Advance

Outputs = dict[str, Any]
"""Arrays by name, plain or recomputable."""

TRUNK: Final = 3  # layers
BATCH: Final = 128


class Weights(NamedTuple):
    """Kernels and offsets of the trunk, and for each member kernels, offsets and what its scores are made with."""

    trunk: list[tuple[Array, Array]]
    members: list[tuple[Array, Array, Array]]


def initial(members: int, channels: int, seed: int = 0) -> Weights:
    """By chance."""
    keys = iter(jax.random.split(jax.random.key(seed), TRUNK + 2 * members))

    def kernel(before: int) -> Array:
        scale: float = (2 / (9 * before)) ** 0.5
        return jax.random.normal(next(keys), (3, 3, before, channels)) * scale

    trunk = [(kernel(channels if number else 1), jnp.zeros(channels)) for number in range(TRUNK)]
    last = (64 * channels, 10)
    of_members = [(kernel(channels), jnp.zeros(channels)) for _ in range(members)]
    return Weights(trunk, [(*pair, jax.random.normal(next(keys), last) / 64) for pair in of_members])


def layer(x: Array, kernel: Array, offset: Array) -> Array:
    """A convolution, and what of it is positive."""
    found = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(found + offset)


def trunk(weights: Weights, images: Array) -> Outputs:
    """What all members share: maps of (images, 8, 8, channels), one for each layer."""
    found = {}
    x = images.reshape(-1, 8, 8, 1)
    for number, (kernel, offset) in enumerate(weights.trunk):
        x = found[f"trunk {number}"] = layer(x, kernel, offset)
    return found


def member(weights: tuple[Array, Array, Array], shared: Array) -> Outputs:
    """Maps of its own, and the probability of each digit: (images, 10)."""
    kernel, offset, last = weights
    maps = layer(shared, kernel, offset)
    return {"maps": maps, "thinks": jax.nn.softmax(maps.reshape(len(maps), -1) @ last)}


def together(probabilities: Sequence[Array]) -> Outputs:
    """What the members think on average, and in how far they disagree: the variance, added up over digits."""
    found = jnp.stack(list(probabilities))
    return {"together": found.mean(0), "disagreement": found.var(0).sum(1)}


def learn(weights: Weights, steps: int, advance: Advance) -> Weights:
    """Adam; each member counts each image by a chance of its own, the trunk learns from all."""
    images, digits = load()
    optimizer = optax.adam(3e-3)
    chance = np.random.default_rng(1)
    counts = chance.poisson(1, (len(weights.members), len(digits))).astype(np.float32)  # as bagging does

    def loss(weights: Weights, images: Array, digits: Array, counts: Array) -> Array:
        shared = trunk(weights, images)[f"trunk {TRUNK - 1}"]
        found = [jnp.log(member(own, shared)["thinks"] + 1e-9) for own in weights.members]
        return -jnp.mean(counts * jnp.stack(found)[:, jnp.arange(len(digits)), digits])

    @jax.jit
    def step(weights: Weights, state: Any, *batch: Array) -> Any:
        changes, state = optimizer.update(jax.grad(loss)(weights, *batch), state)
        return optax.apply_updates(weights, changes), state

    state = optimizer.init(weights)
    for _ in range(steps):
        chosen = chance.integers(UNSEEN, len(digits), BATCH)
        weights, state = step(weights, state, images[chosen], digits[chosen], counts[:, chosen])
        advance(1, "learning")
    return weights
