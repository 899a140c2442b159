"""NumPy for recompute: how the cache sees arrays and scalars."""

try:
    from recompute_numpy._adapter import adapter
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ModuleNotFoundError(
        "recompute_numpy serves the arrays of NumPy, which is not installed: pip install '.[numpy]' in a checkout",
        name="numpy",
    ) from None

__all__ = ["adapter"]
