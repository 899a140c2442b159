"""NumPy for recompute: how the cache sees arrays and scalars, and a demonstration on real text (`letters`)."""

from recompute_numpy._adapter import NumpyAdapter, adapter

__all__ = ["NumpyAdapter", "adapter"]
