"""HIPS autograd over recomputable arrays: import this module to register them.

Then checkpointing is not part of the autodiff: it differentiates ordinary array code, and the cache decides which of
the arrays that the backward pass will need stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    import autograd.numpy as anp
except ModuleNotFoundError as error:
    if error.name not in ("autograd", "autograd.numpy"):
        raise
    raise ModuleNotFoundError(
        "recompute_autograd is for HIPS autograd, which is not installed: pip install '.[autograd]' in a checkout",
        name="autograd",
    ) from None
import numpy as np
from autograd.core import def_linear, primitive_vjps
from autograd.extend import VSpace, defvjp, defvjp_argnums, primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vjps import dot_adjoint_0, dot_adjoint_1, match_complex
from autograd.tracer import getval

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


# autograd's derivatives of `dot` end with `asarray`, which would make plain arrays of the gradients. For wrapped arrays
# the same functions are registered as operations.


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def _adjoint_0(b: Any, gradient: Any, *about: Any) -> Any:
    return rc.ap(dot_adjoint_0.fun, b, gradient, *about)


@primitive  # type: ignore[untyped-decorator]
def _adjoint_1(a: Any, gradient: Any, *about: Any) -> Any:
    return rc.ap(dot_adjoint_1.fun, a, gradient, *about)


def _dot_vjp(argnum: int, a: Any, b: Any) -> Any:
    about = anp.metadata(a), anp.metadata(b)
    if argnum == 0:
        return lambda gradient: match_complex(a, _adjoint_0(b, gradient, *about))
    return lambda gradient: match_complex(b, _adjoint_1(a, gradient, *about))


def _dot_vjps(argnums: Any, answer: Any, args: Any, keywords: Any) -> Any:
    if not isinstance(getval(answer), rc.RecomputableArray):
        return _plain_dot_vjps(argnums, answer, args, keywords)
    vjps = [_dot_vjp(argnum, *args) for argnum in argnums]
    return lambda gradient: (vjp(gradient) for vjp in vjps)


_plain_dot_vjps = primitive_vjps[anp.dot]
defvjp_argnums(anp.dot, _dot_vjps)
defvjp(
    _adjoint_0,
    lambda answer, b, gradient, *about: lambda a: match_complex(b, _adjoint_1(a, gradient, *about)),
    lambda answer, b, gradient, *about: lambda a: match_complex(gradient, anp.dot(a, b)),
)
defvjp(
    _adjoint_1,
    lambda answer, a, gradient, *about: lambda b: match_complex(a, _adjoint_0(b, gradient, *about)),
    lambda answer, a, gradient, *about: lambda b: match_complex(gradient, anp.dot(a, b)),
)
def_linear(_adjoint_0)
def_linear(_adjoint_1)
ArrayBox.register(rc.RecomputableArray)
VSpace.register(rc.RecomputableArray, RecomputableVSpace)

__all__ = ["RecomputableVSpace"]
