"""DataFrame, Series and Index as the cache sees them."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, Final

import recompute as rc


class PandasAdapter(rc.adapters.Adapter):
    """Frames, series and indexes. Each counts all it holds: which of them share memory, pandas does not tell."""

    name = "pandas"

    def serves(self, cls: type) -> bool:
        """Frames, series and indexes; a Timestamp or a Categorical is a plain object."""
        pandas = sys.modules.get("pandas")  # None while pandas is still being imported
        return pandas is not None and issubclass(cls, (pandas.DataFrame, pandas.Series, pandas.Index))

    def nbytes(self, value: Any) -> int:
        """`memory_usage(deep=True)`: bytes of values, labels and Python objects. O(rows) for columns of objects."""
        usage = value.memory_usage(deep=True)
        return int(usage.sum() if value.ndim == 2 else usage)

    def signature(self, value: Any) -> Hashable:
        """Type, shape and dtypes."""
        return (type(value), value.shape, tuple(value.dtypes) if value.ndim == 2 else value.dtype)

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of type, labels, dtypes, attributes and content; None if something in them cannot be checked."""
        cls = type(value)
        parts: list[Any] = [f"{cls.__module__}.{cls.__qualname__}"]
        if value.ndim == 2:
            parts += _index(value.index), _index(value.columns)
            parts += [_column(value.iloc[:, number]) for number in range(value.shape[1])]
        elif hasattr(value, "index"):
            parts += _index(value.index), value.name, _column(value)
        else:
            parts.append(_index(value))
        if hasattr(value, "attrs"):
            own = [getattr(value, name, None) for name in value._metadata]  # of a subclass, such as a projection
            parts += value.attrs, value.flags.allows_duplicate_labels, own
        return super().fingerprint(parts)


def _index(index: Any) -> list[Any]:
    """Names, a column for each level, and the distance of times that follow each other."""
    levels = [index.get_level_values(number) for number in range(index.nlevels)]
    return [list(index.names), [_column(level) for level in levels], getattr(index, "freqstr", None)]


def _column(column: Any) -> list[Any]:
    """Arrays and plain objects that say what a column holds: NumPy's bits where it is NumPy's, else pandas' hashes."""
    from numpy import asarray, dtype
    from pandas import CategoricalDtype
    from pandas.util import hash_array

    kind = column.dtype
    if isinstance(kind, CategoricalDtype):
        return ["category", kind.ordered, _column(kind.categories), column.array.codes]
    if kind == "object":
        return ["object", column.tolist()]
    if isinstance(kind, dtype):
        return [str(kind), column.to_numpy()]
    return [str(kind), asarray(column.isna()), hash_array(column.array)]


pandas: Final = PandasAdapter()
