"""Polars' frames and series as the cache sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from io import BytesIO
from typing import Any, Final, NamedTuple

import recompute as rc


class _Column(NamedTuple):
    """What a column is beyond its chunks."""

    sizes: list[int]
    """Bytes of each chunk in Arrow's format."""
    flags: dict[str, bool]


class PolarsAdapter(rc.adapters.Adapter):
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

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Each chunk of each column in Arrow's format, which Polars copies: a sum depends on how a column is cut.

        What has no columns, or is of a subclass, as pickle does it. Raises what Polars does for columns of objects.
        """
        import polars

        columns = _columns(value)
        if type(value) not in (polars.DataFrame, polars.Series) or not columns:
            return super().pack(value)
        states = [[chunk.__getstate__() for chunk in column.get_chunks()] for column in columns]
        heads = [
            _Column([len(state) for state in chunks], column.flags)
            for column, chunks in zip(columns, states, strict=True)
        ]
        return (type(value), heads), [state for chunks in states for state in chunks]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        """With the same chunks, known to be sorted if they were."""
        if isinstance(head, tuple) and isinstance(head[0], type):
            cls, heads = head
            columns = [_column(head, load) for head in heads]
            return cls(columns) if len(columns) != 1 or cls is not type(columns[0]) else columns[0]
        return super().unpack(head, load)


def _columns(value: Any) -> list[Any]:
    return list(value.get_columns()) if hasattr(value, "get_columns") else [value]


def _column(head: _Column, load: Callable[[Any], None]) -> Any:
    import polars

    column: Any = None
    for size in head.sizes:
        memory = bytearray(size)
        load(memory)
        chunk = polars.Series.__new__(polars.Series)
        chunk.__setstate__(memory)  # type: ignore[arg-type]  # it takes any bytes
        column = chunk if column is None else column.append(chunk)
    for flag, descending in (("SORTED_ASC", False), ("SORTED_DESC", True)):
        if head.flags.get(flag) and not column.flags.get(flag):
            column = column.set_sorted(descending=descending)
    return column


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
