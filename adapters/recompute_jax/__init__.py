"""JAX for recompute: how the cache sees arrays, and functions that run within a memory budget."""

from recompute_jax._adapter import JaxAdapter, adapter
from recompute_jax._evaluate import evaluate, op_by_op
from recompute_jax._remat import remat
from recompute_jax._trees import ap, lift

__all__ = ["JaxAdapter", "adapter", "ap", "evaluate", "lift", "op_by_op", "remat"]
