"""A residual network that reads handwritten digits, as array code: its operations, their derivatives, its data.

A body sees plain arrays. NumPy's functions hand them over to CuPy where they are CuPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple

import numpy as np
from autograd.extend import defvjp, primitive

import recompute as rc

Array = Any  # NumPy's, CuPy's, or a recomputable one

PATCHED: Final = 16  # images that a function has temporary arrays for at a time


# Operations


def operation(nout: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of arrays one operation of the cache if any array is recomputable, else call it."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        lifted = rc.lift(nout=nout)(function)

        @wraps(function)
        def either(*args: Any) -> Any:
            return (lifted if any(isinstance(arg, rc.Recomputable) for arg in args) else function)(*args)

        return either

    return decorate


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
@operation()
def convolve(x: Array, weights: Array) -> Array:
    """Images (n, height, width, from) with kernels (3, 3, from, to); zeros around the images."""
    return convolved(x, weights)


@operation()
def convolve_back(gradient: Array, weights: Array) -> Array:
    """The gradient of `convolve` by its images: kernels turned around, and from and to exchanged."""
    return convolved(gradient, weights[::-1, ::-1].swapaxes(2, 3))


@operation()
def correlate(x: Array, gradient: Array) -> Array:
    """The gradient of `convolve` by its kernels."""
    channels = gradient.shape[-1]
    total = np.zeros_like(x, shape=(9 * x.shape[-1], channels))
    for at in range(0, len(x), PATCHED):
        total += patches(x[at : at + PATCHED]).T @ gradient[at : at + PATCHED].reshape(-1, channels)
    return total.reshape(3, 3, -1, channels)


def convolved(x: Array, weights: Array) -> Array:
    kernels = weights.reshape(-1, weights.shape[-1])
    result = np.empty_like(x, shape=(*x.shape[:-1], weights.shape[-1]))
    for at in range(0, len(x), PATCHED):
        part = result[at : at + PATCHED]
        part[...] = (patches(x[at : at + PATCHED]) @ kernels).reshape(part.shape)
    return result


def patches(x: Array) -> Array:
    """The 3 x 3 pixels around each pixel of a few images, a row for each: nine times their memory."""
    images, height, width, channels = x.shape
    padded = np.zeros_like(x, shape=(images, height + 2, width + 2, channels))
    padded[:, 1:-1, 1:-1] = x
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, 9 * channels)


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
@operation()
def rectify(x: Array) -> Array:
    """What is negative becomes zero."""
    return np.maximum(x, 0)


@operation()
def rectify_back(gradient: Array, result: Array) -> Array:
    """The gradient of `rectify`, by what it returned."""
    found = np.empty_like(result)
    for at in range(0, len(result), PATCHED):
        found[at : at + PATCHED] = gradient[at : at + PATCHED] * (result[at : at + PATCHED] > 0)
    return found


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
@operation()
def cross_entropy(scores: Array, wanted: Array) -> Array:
    """The mean over images of -log P(the digit); scores and digits (as ones among zeros) of shape (n, 10)."""
    scores = scores - scores.max(1, keepdims=True)
    return (np.log(np.exp(scores).sum(1)) - (scores * wanted).sum(1)).mean()


@operation()
def cross_entropy_back(gradient: Array, scores: Array, wanted: Array) -> Array:
    """The gradient of `cross_entropy` by the scores."""
    likely = np.exp(scores - scores.max(1, keepdims=True))
    return (likely / likely.sum(1, keepdims=True) - wanted) * (gradient / len(scores)).astype(scores.dtype)


defvjp(
    convolve,
    lambda result, x, weights: lambda gradient: convolve_back(gradient, weights),
    lambda result, x, weights: lambda gradient: correlate(x, gradient),
)
defvjp(rectify, lambda result, x: lambda gradient: rectify_back(gradient, result))
defvjp(
    cross_entropy, lambda result, scores, wanted: lambda gradient: cross_entropy_back(gradient, scores, wanted), None
)


# The network


def initial(depth: int, channels: int, seed: int) -> list[Any]:
    """Kernels and biases of each layer, then of the scores; in single precision, of NumPy."""
    random = np.random.default_rng(seed)
    found: list[Any] = []
    before = 1
    for layer in range(depth):
        scale = (2 / (9 * before)) ** 0.5 * (1 if layer == 0 else 1 / depth)
        found += [scale * random.normal(size=(3, 3, before, channels)), np.zeros(channels)]
        before = channels
    found += [0.1 * random.normal(size=(64 * before, 10)) / (64 * before) ** 0.5, np.zeros(10)]
    return [array.astype(np.float32) for array in found]


def scores(parameters: Sequence[Array], x: Array) -> Array:
    """A residual network: each layer adds something to what the one before it found."""
    *layers, weights, bias = parameters
    x = rectify(convolve(x, layers[0]) + layers[1])
    for kernels, offset in zip(layers[2::2], layers[3::2], strict=True):
        x = x + rectify(convolve(x, kernels) + offset)
    return x.reshape((len(x), -1)) @ weights + bias


def loss(parameters: Sequence[Array], images: Array, wanted: Array) -> Array:
    """What training makes small."""
    return cross_entropy(scores(parameters, images), wanted)


# The digits


class Digits(NamedTuple):
    """Images (n, 8, 8, 1), from 0 to 1, and what they show: ones among zeros, (n, 10)."""

    images: Array
    wanted: Array

    def take(self, chosen: Any) -> Digits:
        return Digits(self.images[chosen], self.wanted[chosen])


def load(xp: Any = np) -> tuple[Digits, Digits]:
    """1,437 digits to learn from and 360 to be examined in, that come with scikit-learn, in single precision."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order, :, :, None] / 16).astype(np.float32)
    wanted = np.eye(10, dtype=np.float32)[found.target[order]]
    digits = Digits(xp.asarray(images), xp.asarray(wanted))
    return digits.take(slice(360, None)), digits.take(slice(360))
