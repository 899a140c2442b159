"""That recompute is installed, and not only found on the path: adapters of arrays and frames are entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

GROUP: Final = "recompute.adapters"


def check() -> None:
    """Raises ImportError, with the cure, if nobody would find the adapter of NumPy: arrays could not be measured."""
    if not entry_points(group=GROUP, name="numpy"):
        raise ImportError(
            "recompute_dask was found on the path, but recompute-cache is not installed: so its adapters for NumPy "
            "and other packages are not found, and arrays would be counted as plain Python objects; "
            "pip install '.[dask]' in a checkout"
        )


check()
