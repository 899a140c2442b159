"""JAX for recompute: how the cache sees arrays, and functions that run within a memory budget."""

try:
    from recompute_jax._adapter import JaxAdapter, adapter
    from recompute_jax._evaluate import evaluate, op_by_op
    from recompute_jax._remat import remat
    from recompute_jax._trees import ap, lift
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "recompute_jax serves the arrays of JAX, which is not installed: pip install 'recompute-cache[jax]'",
        name="jax",
    ) from None

__all__ = ["JaxAdapter", "adapter", "ap", "evaluate", "lift", "op_by_op", "remat"]
