"""Which versions of Dask this is made for: parts of it are used that Dask does not call public."""

from __future__ import annotations

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


def check(name: str, version: str) -> None:
    """Raises ImportError, with the cure, for a version that is known not to work, or that nobody has tried."""
    if not _numbers(OLDEST) <= _numbers(version) < (_numbers(NEWEST)[0] + 1,):
        raise ImportError(
            f"recompute_dask works with {name} {OLDEST} to {NEWEST}, and {version} is installed: it uses how {name} "
            f"holds and runs tasks, which changes with its versions; pip install '{name}>={OLDEST},<={NEWEST}.*', or "
            "a newer recompute-cache"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Year and month."""
    return tuple([int(part) for part in version.split(".")[:2] if part.isdecimal()])


check("dask", dask.__version__)  # type: ignore[attr-defined]  # it is there
