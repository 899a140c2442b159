"""Polars' frames and series as the cache sees them."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final

import recompute as rc


class PolarsAdapter(rc.Adapter):
    """Frames and series. Each counts all that it shows: which of them share memory, Polars does not tell."""

    name = "polars"

    def serves(self, cls: type) -> bool:
        """Frames and series; a LazyFrame is a plain object, whose plan may hold more than Python sees."""
        polars = sys.modules.get("polars")
        return polars is not None and issubclass(cls, (polars.DataFrame, polars.Series))

    def nbytes(self, value: Any) -> int:
        """`estimated_size`, which takes of a slice its own rows alone; columns of Python objects with their objects."""
        import polars

        objects = [column.to_list() for column in _columns(value) if column.dtype == polars.Object]
        return int(value.estimated_size()) + (super().nbytes(objects) if objects else 0)

    def signature(self, value: Any) -> Hashable:
        """Type, shape and dtypes."""
        return (type(value), value.shape, *(column.dtype for column in _columns(value)))

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of type, names, dtypes and content, whatever the chunks; None if an object cannot be checked."""
        cls = type(value)
        parts: list[Any] = [f"{cls.__module__}.{cls.__qualname__}", value.shape]
        for column in _columns(value):
            parts += column.name, str(column.dtype), *_content(column)
        return super().fingerprint(parts)


def _columns(value: Any) -> list[Any]:
    return list(value.get_columns()) if hasattr(value, "get_columns") else [value]


def _content(column: Any) -> list[Any]:
    """Which cells are null, and the others; what lies under a null is noise."""
    import polars

    if column.dtype == polars.Object:
        return list(column.to_list())
    if isinstance(column.dtype, polars.Categorical):
        column = column.cast(polars.String)  # its codes depend on what was seen before
    return [_digest(column.is_null()), _digest(column.drop_nulls())]


def _digest(column: Any) -> bytes:
    """Of cells without nulls, in Arrow's format, copied: else what slices and chunks left there would count."""
    import polars

    if column.dtype == polars.Boolean:
        column = column.cast(polars.UInt8)  # the last byte of bits has room for noise
    copied = column.rechunk().gather(polars.arange(len(column), eager=True))
    file = BytesIO()
    copied.alias("").to_frame().write_ipc_stream(file)
    return blake2b(file.getbuffer(), digest_size=16).digest()


polars: Final = PolarsAdapter()
