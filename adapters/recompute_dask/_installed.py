"""What has to be installed: Dask, of a version that this is made for, and recompute, not only found on the path."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

try:
    import dask
except ModuleNotFoundError as error:
    if error.name != "dask":
        raise
    raise ModuleNotFoundError(
        "recompute_dask is for Dask, which is not installed: pip install '.[dask]' in a checkout", name="dask"
    ) from None

OLDEST: Final = "2026.1"
"""The first version that the tests pass with."""
NEWEST: Final = "2026.8"
"""The last one that they were run with; what follows within a year is believed to be like it."""


def check_version(name: str, version: str) -> None:
    """Raises ImportError, with the cure, for a version that is known not to work, or that was not tried.

    Parts of Dask are used that it does not call public.
    """
    if not _numbers(OLDEST) <= _numbers(version) < (_numbers(NEWEST)[0] + 1,):
        raise ImportError(
            f"recompute_dask works with {name} {OLDEST} to {NEWEST}, and {version} is installed: it uses how {name} "
            f"holds and runs tasks, which changes with its versions; pip install '{name}>={OLDEST},<={NEWEST}.*', or "
            "a newer recompute-cache"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Year and month."""
    return tuple([int(part) for part in version.split(".")[:2] if part.isdecimal()])


if not entry_points(group="recompute.adapters", name="numpy"):
    raise ImportError(
        "recompute_dask was found on the path, but recompute-cache is not installed: so its adapters for NumPy and "
        "other packages are not found, and arrays would be counted as plain Python objects; pip install '.[dask]' in a "
        "checkout"
    )
check_version("dask", dask.__version__)  # type: ignore[attr-defined]  # it is there
