"""A small transformer that reads letters, of equinox, and its training step, by optax: neither knows of a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from recompute_demos.letters import ALPHABET, encode, read

Wrap = Callable[[Callable[[Array], Array]], Callable[[Array], Array]]
"""What is done to each block of the model, such as `equinox.filter_checkpoint`."""


class Block(eqx.Module):
    """Attention to what was before, then a network for each place; each adds to what it reads."""

    attention: eqx.nn.MultiheadAttention
    network: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, width: int, heads: int, key: Array) -> None:
        one, two = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
        self.network = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=two)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)

    def __call__(self, x: Array) -> Array:
        """From (places, width) to the same."""
        seen = jax.vmap(self.norms[0])(x)
        past = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(seen, seen, seen, mask=past)
        return x + jax.vmap(self.network)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """The scores of the next letter, at each place of a window."""

    letters: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    scores: eqx.nn.Linear

    def __init__(self, depth: int, width: int, heads: int, window: int, key: Array) -> None:
        one, two, three, *keys = jax.random.split(key, 3 + depth)
        self.letters = eqx.nn.Embedding(weight=jax.random.normal(one, (len(ALPHABET), width)) / 10)
        self.places = eqx.nn.Embedding(weight=jax.random.normal(two, (window, width)) / 10)
        self.blocks = [Block(width, heads, own_key) for own_key in keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.scores = eqx.nn.Linear(width, len(ALPHABET), key=three)

    def __call__(self, letters: Array, wrap: Wrap = lambda block: block) -> Array:
        """From numbers of letters, (places,), to scores, (places, letters)."""
        x = jax.vmap(self.letters)(letters) + self.places.weight[: len(letters)]
        for block in self.blocks:
            x = wrap(block)(x)
        return jax.vmap(self.scores)(jax.vmap(self.norm)(x))


def windows(steps: int, batch: int, length: int, seed: int = 0) -> Iterator[Any]:
    """For each step what is read, (batch, 1 + length) numbers of letters, from anywhere in the text."""
    text = encode(read())
    random = np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(0, len(text) - length, batch)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


class Training:
    """A model and its optimiser: a step, and what the first one starts from."""

    def __init__(self, model: Transformer, steps: int, rate: float) -> None:
        self.weights, self.rest = eqx.partition(model, eqx.is_inexact_array)
        schedule = optax.warmup_cosine_decay_schedule(0, rate, max(1, steps // 10), max(2, steps))
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        self.state = self.optimizer.init(self.weights)

    def loss(self, weights: Any, read: Array, wrap: Wrap = lambda block: block) -> Array:
        """Mean cross-entropy of the next letter, in nats. `read` is (batch, 1 + letters)."""
        model = eqx.combine(weights, self.rest)
        scores = jax.vmap(lambda letters: model(letters, wrap))(read[:, :-1])
        losses: Array = optax.softmax_cross_entropy_with_integer_labels(scores, read[:, 1:])
        return losses.mean()

    def step(self, weights: Any, state: Any, read: Array, wrap: Wrap = lambda block: block) -> tuple[Any, Any, Array]:
        """Weights and state after one step, and the loss before it."""
        loss, slopes = jax.value_and_grad(self.loss)(weights, read, wrap)
        updates, state = self.optimizer.update(slopes, state, weights)
        return optax.apply_updates(weights, updates), state, loss


def say(model: Transformer, start: str, count: int, seed: int = 1) -> str:
    """`start`, and so many letters more that the model draws by chance."""
    window = len(model.places.weight)

    @eqx.filter_jit
    def draw(model: Transformer, letters: Any, at: Any, number: Any) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), number)
        return jax.random.categorical(key, 1.25 * model(letters)[at])  # a little bolder than it is

    said = encode(start).tolist()
    for number in range(count):
        last = said[-window:]
        padded = np.array(last + [0] * (window - len(last)), np.int32)  # what comes later is not seen
        said.append(int(draw(model, padded, np.int32(len(last) - 1), np.int32(number))))
    return "".join(ALPHABET[letter] for letter in said)
