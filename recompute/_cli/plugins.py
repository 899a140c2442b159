"""What is installed beside the core: distributions, extras and plug-ins."""

from __future__ import annotations

from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Final

DISTRIBUTION: Final = "recompute-cache"
EXTRAS: Final = {
    "numpy": "numpy",
    "matplotlib": "plot",
    "psutil": "adaptive",
    "rich": "cli",
    "scipy": "plan",
    "hypothesis": "test",
}
"""Optional package -> the extra that installs it."""
NOT_INSTALLED: Final = (
    f"recompute itself is not installed, so its adapters and demos cannot be found: pip install {DISTRIBUTION}, "
    "or pip install -e . in a checkout"
)


def version_of(distribution: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def how_to_get(package: str) -> str:
    """The command that installs a package."""
    extra = EXTRAS.get(package)
    return f"pip install {package}" if extra is None else f"pip install '{DISTRIBUTION}[{extra}]'"


def plugins(group: str) -> list[EntryPoint]:
    """The entry points of a group. Of two with one name, the first is the one that serves."""
    return sorted(entry_points(group=group), key=lambda point: (point.name, point.value))


def missing_package(error: BaseException) -> str | None:
    """The top-level package that an import did not find; None if that is not what went wrong."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0]
    return None
