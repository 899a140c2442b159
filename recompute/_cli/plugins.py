"""Distributions, extras and plug-ins that are installed beside the core."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from typing import Final

DISTRIBUTION: Final = "recompute-cache"
TOOLS: Final = {
    "numpy": "numpy",
    "matplotlib": "plot",
    "psutil": "adaptive",
    "rich": "cli",
    "scipy": "plan",
    "hypothesis": "test",
}
"""Optional package that the library itself uses -> the extra that installs it."""
FRAMEWORKS: Final = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "cupy": "cupy",
    "autograd": "autograd",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "polars": "polars",
    "xarray": "xarray",
    "PIL": "pillow",
}
"""Package whose values an adapter serves -> the extra that installs it."""
NOT_INSTALLED: Final = (
    "recompute itself is not installed, so its adapters and demos cannot be found: pip install . in a checkout"
)


def version_of(distribution: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Package -> the distributions that have it; takes tenths of a second."""
    return packages_distributions()


def is_installed(package: str) -> bool:
    """Whether it can be imported, without importing it. A folder of that name in the path is no package."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # it is there already, and says nothing of itself
        return package in sys.modules
    return spec is not None and spec.origin is not None


def version_of_package(package: str) -> str | None:
    """The version of what `import package` gives; None if that is not installed, or has no version."""
    if not is_installed(package):
        return None
    known = version_of(package)
    return known or next(filter(None, map(version_of, _distributions().get(package, []))), None)


def how_to_get(package: str) -> str:
    """The command that installs a package."""
    extra = {**TOOLS, **FRAMEWORKS, "jaxlib": "jax"}.get(package)
    return f"pip install {package}" if extra is None else f"pip install '.[{extra}]' in a checkout"


def plugins(group: str) -> list[EntryPoint]:
    """The entry points of a group. Of two with one name, the first is the one that serves."""
    return sorted(entry_points(group=group), key=lambda point: (point.name, point.value))


def missing_package(error: BaseException) -> str | None:
    """The top-level package that an import did not find; None if that is not what went wrong."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0]
    return None
