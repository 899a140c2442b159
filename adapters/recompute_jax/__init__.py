"""JAX for recompute: how the cache sees arrays, and functions that run within a memory budget.

How a function becomes a planned function (`remat`), one folder a stage; imports run downwards:

    _remat      the function is traced; the search compiles candidates until one is within the budget
    _branches   conditionals that pass values to each other keep fewer of them, and run equations of a branch again
    _emit       a candidate's order of segments becomes equations again: regions behind gates
    _scans      scans that pass stacks to each other keep less of them, and run steps again in blocks
    _program    the traced function: flat equations, what they cost, the segments that XLA makes from them

    _eager      the other way: `evaluate` runs the equations one by one through the cache, `ap` a function as one,
                and in a `budget` block whatever JAX is called for
    _arrays     how the cache sees arrays: bytes, devices, the time of compilation
"""

try:
    from recompute_jax._arrays.adapter import JaxAdapter, adapter
    from recompute_jax._eager.evaluate import evaluate, op_by_op
    from recompute_jax._eager.live import budget
    from recompute_jax._eager.trees import ap, lift
    from recompute_jax._remat.planned import planned, remat
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "recompute_jax serves the arrays of JAX, which is not installed: pip install '.[jax]' in a checkout",
        name="jax",
    ) from None

__all__ = ["JaxAdapter", "adapter", "ap", "budget", "evaluate", "lift", "op_by_op", "planned", "remat"]
