"""JAX for recompute: how the cache sees arrays, and functions that run within a memory budget.

How a function becomes a planned function (`planned`), one folder a stage; imports run downwards:

    _remat      `planned` is called as `jax.jit`'s functions are, with a plan for each signature that is `traced`;
                inside of `grad` it is one operation (`differentiated`). The `search` compiles `schedules` of
                `candidates`, for a `ladder` of budgets, until one fits; a `recipe` is what a plan decides, in numbers
    _control    conditionals and scans that pass values to each other keep fewer of them: they run equations of a branch
                again (`branches`), and steps of a scan in blocks (`body`, `groups`, `shapes`, `rewrite`, `loops`)
    _program    the traced function: flat equations (`jaxpr`), the `segments` that XLA makes from them and their costs,
                and a planned order of segments as equations again, in regions behind gates (`emit`)

    _eager      the other way: `evaluate` runs the equations one by one through the cache, `ap` a function as one,
                and in a `budget` block whatever JAX is called for
    _arrays     how the cache sees arrays: bytes, devices, the time of compilation (a file)
"""

try:
    from recompute_jax._arrays import JaxAdapter, adapter
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
