"""Values as buffers of bytes and back: pickle with out-of-band buffers, and parts that their adapters pack."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from struct import pack, unpack
from threading import Lock
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed import fetched, packed, unpacked  # it lies beside other tests

import recompute as rc
from lib.vectors import Vector, VectorAdapter, vector
from recompute._adapters import adapter as _adapter
from recompute._adapters.adapter import adapter_for

PLAIN = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)),
        *(st.text(max_size=5), st.binary(max_size=5), st.binary(min_size=5_000, max_size=5_000)),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(max_size=2), inner)),
        *(st.builds(bytearray, st.binary()), st.frozensets(st.integers(), max_size=1)),
    ),
    max_leaves=8,
)


class Packing(VectorAdapter):
    """Packs vectors as eight bytes for each number."""

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        if len(value) == 1:
            return super().pack(value)  # by pickle
        return (len(value), self.device(value)), [pack(f"{len(value)}q", *value.numbers)]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        if not isinstance(head[0], int):
            return super().unpack(head, load)
        memory = bytearray(8 * head[0])
        load(memory)
        return vector(*unpack(f"{head[0]}q", memory), device=head[1])


class Outside:
    """Bytes that pickle leaves outside of its stream."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Outside, (PickleBuffer(self.content),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outside) and bytes(self.content) == bytes(other.content)

    __hash__ = None  # type: ignore[assignment]  # as of bytearrays


@contextmanager
def serving(adapter: rc.adapters.Adapter) -> Iterator[None]:
    before = _adapter._registered[Vector]
    rc.adapters.register(Vector, adapter)
    try:
        yield
    finally:
        rc.adapters.register(Vector, before)


@given(PLAIN)
def test_plain_values_come_back_equal(value: Any) -> None:
    """Whatever pickle takes comes back with its types, however long its stream is."""
    back = unpacked(value)
    assert repr(back) == repr(value)
    assert type(back) is type(value)


@given(st.lists(st.one_of(st.binary(max_size=9).map(Outside), st.lists(st.integers(-9, 9), max_size=3)), max_size=9))
def test_buffers_and_parts_come_back_in_their_places(content: list[Any]) -> None:
    """Buffers of pickle, parts that their adapter packs, and parts that it leaves to pickle may stand in any order."""
    with serving(Packing()):
        value = [part if isinstance(part, Outside) else vector(*part) for part in content]
        assert unpacked({"some": value, "again": value[:1]}) == {"some": value, "again": value[:1]}
        _, parts = packed(value)
        assert sum(map(len, parts)) == sum(
            len(part.content) if isinstance(part, Outside) else 8 * len(part) * (len(part) != 1) for part in value
        )


def test_one_part_comes_back_as_one() -> None:
    """What stands in a value twice, and is packed by its adapter, is one object again; in a cycle, too."""
    with serving(Packing()):
        part = vector(1, 2, 3)
        value: list[Any] = [part, (part,), {"key": part}]
        value.append(value)
        back = unpacked(value)
        assert back[0] == part
        assert back[0] is back[1][0] is back[2]["key"]
        assert back[3] is back


def test_nested_parts_are_packed_by_their_adapters() -> None:
    """A value in a cache that holds such parts comes back from a disk."""
    with serving(Packing()):

        def check(found: Any) -> None:
            assert found == {"a": [vector(1, 2)], "b": b"x" * 5_000}

        fetched(lambda: {"a": [vector(1, 2)], "b": b"x" * 5_000}, check)


def test_what_a_packer_raises_is_the_answer() -> None:
    """A value with a part that cannot be packed cannot be packed either."""

    class Refusing(VectorAdapter):
        def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
            raise BufferError("no vectors today")

    with serving(Refusing()), pytest.raises(BufferError, match="no vectors today"):
        packed([1, vector(1)])
    with pytest.raises(TypeError, match="pickle"):
        packed([Lock()])


def test_large_content_leaves_the_process() -> None:
    """A long stream and out-of-band buffers are not remembered; a short stream is."""
    head, parts = packed(["text"] * 3)
    assert parts == []
    head, parts = packed([str(number) for number in range(5_000)])
    assert len(head.stream) == 16
    assert [len(part) for part in parts] == [head.length]
    head, parts = packed([Outside(bytes(100_000)), array("d", [1.0])])
    assert [len(part) for part in parts] == [100_000]


def test_buffers_are_not_copied() -> None:
    """What pickle leaves outside is the memory of the value itself."""
    content = bytearray(b"some")
    _, (buffer,) = adapter_for(Outside(content)).pack(Outside(content))
    content[0] = ord("S")
    assert bytes(buffer) == b"Some"


def test_a_stream_that_was_changed_is_not_unpickled() -> None:
    """What left the process is believed only if it is what it was."""
    adapter = adapter_for([])
    head, (stream,) = adapter.pack(["text" * 2_000])

    def load(memory: Any) -> None:
        memory[:] = stream
        memory[100] ^= 1

    with pytest.raises(ValueError, match="not what was written"):
        adapter.unpack(head, load)
