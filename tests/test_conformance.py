"""The conformance kit passes right adapters, and catches each that is wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

from lib.vectors import Vector, VectorAdapter, vector
from recompute.adapters import Adapter
from recompute.testing import check_adapter


def some() -> Vector:
    return vector(1, 2, 3)


def none() -> Vector:
    return vector()


def tail(value: Vector) -> Vector:
    return value.view(1)


def change(value: Vector) -> None:
    value.buffer.numbers = (*value.buffer.numbers[:-1], 99)


def check(adapter: Adapter) -> None:
    check_adapter(adapter, [some], view=tail, change=change)


def test_a_right_adapter_passes() -> None:
    """Vectors, empty ones too, and plain Python objects."""
    check(VectorAdapter())
    check_adapter(VectorAdapter(), [some, none], view=tail)
    check(Packing())
    check(Refusing())
    check_adapter(Adapter(), [lambda: [1, [2]], lambda: {1: bytearray(9)}, lambda: ("a", object), list])
    check_adapter(Adapter(), [lambda: bytearray(b"abc")], change=lambda value: value.append(1))


class Fractional(VectorAdapter):
    def nbytes(self, value: Any) -> int:
        return 1.5  # type: ignore[return-value]  # on purpose


class Negative(VectorAdapter):
    def nbytes(self, value: Any) -> int:
        return -8


class Unstable(VectorAdapter):
    asked = 0

    def nbytes(self, value: Any) -> int:
        self.asked += 1
        return self.asked


class Copies(VectorAdapter):
    def buffer(self, value: Any) -> object:
        return object()


class Blind(VectorAdapter):
    def buffer(self, value: Any) -> object:
        return value


class Confused(VectorAdapter):
    def buffer(self, value: Any) -> object:
        return self


class Clinging(VectorAdapter):
    def watch(self, value: Any) -> object:
        return self


class Fleeting(VectorAdapter):
    def watch(self, value: Any) -> object:
        return VectorAdapter()


class Shortsighted(VectorAdapter):
    def watch(self, value: Any) -> object:
        return value


class Unwatchable(VectorAdapter):
    def watch(self, value: Any) -> object:
        return 7


class Meddling(VectorAdapter):
    def freeze(self, value: Any) -> None:
        value.buffer.numbers = (0,) * len(value)


class Growing(VectorAdapter):
    def freeze(self, value: Any) -> None:
        value.buffer.slack = 8


class Unhashable(VectorAdapter):
    def signature(self, value: Any) -> Hashable:
        return [len(value)]  # type: ignore[return-value]  # on purpose


class Individual(VectorAdapter):
    def signature(self, value: Any) -> Hashable:
        return id(value)


class Textual(VectorAdapter):
    def fingerprint(self, value: Any) -> bytes:
        return "abc"  # type: ignore[return-value]  # on purpose


class Indifferent(VectorAdapter):
    def fingerprint(self, value: Any) -> bytes:
        return b"same"


class Personal(VectorAdapter):
    def fingerprint(self, value: Any) -> bytes:
        return str(id(value)).encode()


class Hoarding(VectorAdapter):
    def __init__(self) -> None:
        self.hoard: list[Any] = []

    def device(self, value: Any) -> str:
        self.hoard.append(value)
        return "cpu"


class Numbered(VectorAdapter):
    def device(self, value: Any) -> str:
        return 0  # type: ignore[return-value]  # on purpose


class Unserving(VectorAdapter):
    def serves(self, cls: type) -> bool:
        return False


class Boasting(VectorAdapter):
    def free_memory(self, device: str) -> int | None:
        return -1


class Invisible(VectorAdapter):
    def devices(self) -> list[str]:
        return "cpu"  # type: ignore[return-value]  # on purpose


class Packing(VectorAdapter):
    """Packs numbers as bytes, and is right."""

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return self.device(value), [bytes(value.numbers)]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        memory = bytearray(3)
        load(memory)
        return vector(*memory, device=head)


class Refusing(VectorAdapter):
    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        raise BufferError("it cannot be moved")


class Spoiling(Packing):
    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        packed = super().pack(value)
        change(value)
        return packed


class Possessive(Packing):
    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return value, [bytes(value.numbers)]


class Listing(Packing):
    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        return self.device(value), [value.numbers]


class Forgetful(Packing):
    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        return some()


class Greedy(Packing):
    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        made = super().unpack(head, load)
        load(bytearray(3))
        return made


class Short(Packing):
    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        load(bytearray(2))
        return some()


class Inexact(Packing):
    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        return tail(super().unpack(head, load))


class Astray(Packing):
    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        return super().unpack("gpu:0", load)

    def fingerprint(self, value: Any) -> bytes:
        return bytes(value.numbers)


class Swollen(Packing):
    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        made = super().unpack(head, load)
        made.buffer.slack = 8
        return made


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Fractional, "not an int"),
        (Negative, "negative"),
        (Unstable, "asked twice"),
        (Copies, "new object each time"),
        (Blind, "a view does not share"),
        (Confused, "two values of their own share"),
        (Clinging, "outlives"),
        (Fleeting, "died before the value"),
        (Shortsighted, "while a view holds the memory"),
        (Unwatchable, "no weak references"),
        (Meddling, "freeze changed the value"),
        (Growing, "freeze changed the size"),
        (Unhashable, "cannot be hashed"),
        (Individual, "signatures of equal values differ"),
        (Textual, "not bytes"),
        (Indifferent, "did not see a change"),
        (Personal, "fingerprints of equal values differ"),
        (Hoarding, "device keeps a reference"),
        (Numbered, "not a name"),
        (Unserving, "does not serve"),
        (Boasting, "free_memory gave -1"),
        (Invisible, "not a list of names"),
        (Spoiling, "pack changed the value"),
        (Possessive, "what pack remembers keeps a reference"),
        (Listing, "something else than contiguous buffers"),
        (Forgetful, "left 1 of the buffers"),
        (Greedy, "asked for more buffers"),
        (Short, "asked for 2 bytes of a buffer that has 3"),
        (Inexact, "different from its bytes"),
        (Astray, "another device"),
        (Swollen, "took 32 bytes for a value of 24"),
    ],
)
def test_each_wrong_adapter_is_caught(wrong: Callable[[], Adapter], complaint: str) -> None:
    """An adapter that breaks one promise is told which."""
    kept: list[Vector] = []

    def make() -> Vector:
        kept.append(some())
        return kept.pop() if wrong is not Individual and wrong is not Personal else kept[-1]

    with pytest.raises(AssertionError, match=complaint):
        check_adapter(wrong(), [make], view=tail, change=change)


def test_a_round_trip_that_changes_the_value_is_caught() -> None:
    """A maker that gives something else the second time comes back different."""
    numbers = iter(range(100))
    with pytest.raises(AssertionError, match=r"equal values differ|came back different"):
        check_adapter(VectorAdapter(), [lambda: vector(next(numbers))])


def test_the_registry_is_left_as_it_was() -> None:
    """Checking an adapter does not make it serve anybody else."""
    from recompute._adapters.adapter import adapter_for

    before = adapter_for(some())
    check(VectorAdapter())
    assert adapter_for(some()) is before
    check_adapter(Adapter(), [lambda: bytearray(3)])
    assert type(adapter_for(bytearray())) is Adapter
