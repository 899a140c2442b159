"""HIPS autograd over recomputable arrays: importing this registers them, and that is all of it.

Checkpointing is then no part of the autodiff: it differentiates ordinary array code, and the cache decides which of the
arrays that the backward pass will ask for stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from autograd.extend import VSpace
from autograd.numpy.numpy_boxes import ArrayBox

import recompute as rc


class RecomputableVSpace(VSpace):  # type: ignore[misc]  # autograd has no types
    """The vectors of one shape and dtype, as arrays of one cache; complex ones as pairs of reals."""

    def __init__(self, value: rc.RecomputableArray) -> None:
        self.shape = value.shape
        self.dtype = value.dtype
        self.iscomplex = self.dtype.kind == "c"
        self.cache = value.cache
        self.xp = value.__array_namespace__()

    @property
    def size(self) -> int:
        """How many reals make a vector."""
        return int(np.prod(self.shape)) * (2 if self.iscomplex else 1)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def zeros(self) -> Any:
        with self.cache:
            return self.xp.zeros(self.shape, dtype=self.dtype)

    def ones(self) -> Any:
        """All ones; 1 + 1j for complex vectors, as autograd has it."""
        with self.cache:
            ones = self.xp.ones(self.shape, dtype=self.dtype)
        return ones + 1j * ones if self.iscomplex else ones

    def standard_basis(self) -> Iterator[Any]:
        for index in np.ndindex(*self.shape):
            for unit in (1.0, 1.0j) if self.iscomplex else (1.0,):
                vector = self.zeros()
                vector[index] = unit
                yield vector

    def randn(self) -> Any:
        """Normally distributed, for autograd's own tests."""
        parts = [np.random.randn(*self.shape) for _ in range(2 if self.iscomplex else 1)]
        plain = np.array(parts[0] + 1j * parts[1] if self.iscomplex else parts[0]).astype(self.dtype)
        with self.cache:
            return self.xp.asarray(plain)

    def _mut_add(self, x: Any, y: Any) -> Any:
        """In a new version: what `x` was is a dependency of other values."""
        total = rc.array(x)
        total += y
        return total

    def _inner_prod(self, x: Any, y: Any) -> Any:
        x = np.conj(np.ravel(x)) if self.iscomplex else np.ravel(x)
        product = np.dot(x, np.ravel(y))
        return np.real(product) if self.iscomplex else product

    def _covector(self, x: Any) -> Any:
        return np.conj(x) if self.iscomplex else x


ArrayBox.register(rc.RecomputableArray)
VSpace.register(rc.RecomputableArray, RecomputableVSpace)

__all__ = ["RecomputableVSpace"]
