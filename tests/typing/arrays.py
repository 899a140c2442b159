"""What checkers know of functions of NumPy, many of which have several signatures, and of wrapped arrays."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import recompute as rc

matrix = rc.pure(np.ones((3, 3)))
assert_type(rc.ap(np.linalg.norm, matrix).get(), np.floating[Any])
values, vectors = rc.ap(np.linalg.eigh, matrix, nout=2)
u, s, v = rc.ap(np.linalg.svd, matrix, nout=3)
tanh = rc.ap(np.tanh, matrix).get() + 1
product = rc.lift(np.matmul)(matrix, np.ones(3)).get() + 1
joined = rc.ap(np.concatenate, [matrix, matrix], axis=1).get()

wrapped = rc.array(np.ones(3))
total = (wrapped * 2 + np.ones(3)).sum()
assert_type(wrapped.pin(), rc.RecomputableArray)
xp = rc.namespace(np)
made = xp.zeros(3) + wrapped
