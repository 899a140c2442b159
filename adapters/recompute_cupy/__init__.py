"""CuPy for recompute: how the cache sees arrays on a GPU, and an allocator that asks it for room (`install`)."""

try:
    from recompute_cupy._adapter import adapter
    from recompute_cupy._allocator import Allocator, DeviceMemoryError, Pool, install, uninstall
    from recompute_cupy._streams import join
except ModuleNotFoundError as error:
    if error.name != "cupy":
        raise
    raise ModuleNotFoundError(
        "recompute_cupy serves the arrays of CuPy, which is not installed: pip install '.[cupy]' in a checkout, or the "
        "CuPy that fits your driver",
        name="cupy",
    ) from None

__all__ = ["Allocator", "DeviceMemoryError", "Pool", "adapter", "install", "join", "uninstall"]
