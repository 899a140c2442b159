"""xarray's labelled arrays as the cache sees them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Any, Final

import recompute as rc


class XarrayAdapter(rc.adapters.Adapter):
    """Variables, data arrays, datasets and trees of them. Each counts all that it holds, though they may share it."""

    name = "xarray"

    def serves(self, cls: type) -> bool:
        """What holds arrays; a GroupBy or a Coordinates is a plain object."""
        xarray = sys.modules.get("xarray")
        kinds = [getattr(xarray, name, None) for name in ("Variable", "DataArray", "Dataset", "DataTree")]
        return issubclass(cls, tuple(kind for kind in kinds if kind is not None))

    def nbytes(self, value: Any) -> int:
        """Bytes of each array, index and attribute in memory, once; of arrays that are yet to be computed the recipe.

        What is yet to be read from a file counts nothing, also after it was read through the cached value: `load` it.
        """
        return super().nbytes([value.attrs, *((_held(variable), variable.attrs) for _, variable in _variables(value))])

    def signature(self, value: Any) -> Hashable:
        """Type, and names, dimensions, shapes and dtypes of the variables."""
        return (
            type(value),
            *((name, variable.dims, variable.shape, variable.dtype) for name, variable in _variables(value)),
        )

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of all names, attributes and arrays; None if something is not in memory."""
        cls = type(value)
        parts: list[Any] = [f"{cls.__module__}.{cls.__qualname__}", getattr(value, "name", None), value.attrs]
        parts.append(value.encoding)
        for name, variable in _variables(value):
            if variable.chunks is not None or _held(variable) is None:
                return None
            index = isinstance(variable, sys.modules["xarray"].IndexVariable)
            content = variable.to_index() if index else variable.data
            parts += name, variable.dims, variable.attrs, variable.encoding, content
        return super().fingerprint(parts)


def _variables(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each with its name: that of a dataset in a tree is its path, too."""
    if hasattr(value, "subtree"):
        for node in value.subtree:
            for name, variable in node.dataset.variables.items():
                yield (node.path, name), variable
    elif hasattr(value, "data_vars"):
        yield from value.variables.items()
    elif hasattr(value, "coords"):
        yield None, value.variable
        for name, variable in value.coords.variables.items():
            yield name, variable
    else:
        yield None, value


def _held(variable: Any) -> Any:
    """The array, index or graph of tasks that a variable refers to; None if it is yet to be read from a file."""
    data = variable._data  # `data` reads the file
    wrapped = type(data).__module__.startswith("xarray.")
    return None if wrapped and not variable._in_memory else data


xarray: Final = XarrayAdapter()
