"""Arrow tables, record batches, arrays and buffers as the cache sees them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import recompute as rc


class ArrowAdapter(rc.adapters.Adapter):
    """Tables, batches, arrays and buffers, which never change. Which of them share memory, Arrow does not tell."""

    name = "pyarrow"

    def serves(self, cls: type) -> bool:
        """Tables, batches, arrays and buffers; a scalar, a schema or a data type is a plain object."""
        arrow = sys.modules.get("pyarrow")
        return arrow is not None and issubclass(
            cls, (arrow.Table, arrow.RecordBatch, arrow.ChunkedArray, arrow.Array, arrow.Buffer)
        )

    def nbytes(self, value: Any) -> int:
        """Bytes of each buffer once, and no more than the rows take: a slice is not charged for its whole table."""
        if hasattr(value, "get_total_buffer_size"):
            return int(min(value.get_total_buffer_size(), value.nbytes))
        return int(value.size)

    def signature(self, value: Any) -> Hashable:
        """Rows and columns with their types; of a buffer the bytes."""
        if hasattr(value, "schema"):
            return (value.num_rows, value.schema)
        return (len(value), value.type) if hasattr(value, "type") else value.size

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of the schema, of which cells are null, and of what the others hold, whatever the chunks."""
        import pyarrow  # type: ignore[import-untyped]

        cls = type(value)
        digest = blake2b(f"{cls.__module__}.{cls.__qualname__}".encode(), digest_size=16)
        if isinstance(value, pyarrow.Buffer):
            if not value.is_cpu:
                return None
            digest.update(memoryview(value))
            return digest.digest()
        if hasattr(value, "schema"):
            digest.update(value.schema.serialize())
        for column in getattr(value, "columns", [value]):
            for array in _content(column):
                digest.update(_written(array))
        return digest.digest()

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """Arrow's own buffers; of an array that is a part of larger ones its part, which is copied."""
        import pyarrow

        if isinstance(value, pyarrow.Array) and value.get_total_buffer_size() > _MOST * value.nbytes + _SLACK:
            value = pyarrow.concat_arrays([value])
        return super().pack(value)


_MOST: Final = 1.1
_SLACK: Final = 1024
"""Bytes of the buffers of an array: more than so many times what it shows, and these, belong to a larger one."""


def _content(column: Any) -> Iterator[Any]:
    """A column as one array: first which cells are null, then the others; what lies under a null is noise."""
    import pyarrow
    from pyarrow import compute

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()  # several arrays still, where the cells exceed what one can address
    for array in column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]:
        yield compute.is_valid(array)
        yield array.drop_null() if array.null_count else pyarrow.concat_arrays([array])  # without the rest


def _written(array: Any) -> Any:
    """An array in Arrow's own format, which leaves out what a slice does not show."""
    import pyarrow

    if pyarrow.types.is_boolean(array.type):
        array = array.cast(pyarrow.uint8())  # the last byte of bits has room for noise
    batch = pyarrow.record_batch([array], names=[""])
    file = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    return file.getvalue()


arrow: Final = ArrowAdapter()
