"""How many bytes a plain Python object takes with all it contains."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from recompute._adapters.layouts import layouts
from recompute._adapters.python import ATOMIC
from recompute._interrupts import is_interrupt

_SAMPLE: Final = 1_000  # elements of a container that are looked at; larger ones are extrapolated
_END: Final = object()  # on the stack below the parts of an object that says how large it is


def sizeof(
    value: Any, foreign: Callable[[type], Callable[[Any], int] | None], guessed: Callable[[Any, Any, int], None]
) -> int:
    """Bytes of an object and of what it contains, each part once; a container of more than 1,000 elements is sampled.

    An object that says how large it is (`nbytes`, `estimated_size`, a buffer) counts that, or its parts if they are
    more. `foreign` knows how to measure the types of a part that an adapter serves; `guessed` is told of a part, the
    value and the bytes that are counted where more may be hidden.
    """
    total = 0.0
    seen: dict[int, Any] = {}  # by identity, with the part, which must not die meanwhile
    claims: list[float] = []  # what `total` has to be at least, at each end of an object that says how large it is
    stack: list[tuple[Any, float]] = [(value, 1.0)]
    while stack:
        part, weight = stack.pop()
        measure = ATOMIC.get(type(part))
        if measure is not None:
            total += weight * measure(part)
            continue
        if part is _END:
            total = max(total, claims.pop())
            continue
        if id(part) in seen:
            continue
        seen[id(part)] = part
        measure = foreign(type(part))
        if measure is not None:
            total += weight * measure(part)
            continue
        layout = layouts[type(part)]
        if layout.shared:
            continue
        if layout.claims:
            claimed = layout.claimed(part)
            if claimed is not None:
                claims.append(total + weight * claimed)
                stack.append((_END, 0.0))
        try:
            size = layout.shallow(part)
        except Exception as error:  # somebody's `__sizeof__`
            if is_interrupt(error):
                raise
            size = type(part).__basicsize__
        total += weight * size
        if layout.hidden and not claims:
            guessed(part, value, size)
        if layout.structured:
            stack.extend([(attribute, weight) for attribute in layout.attributes(part)])
        if layout.container is not None:
            count, elements = layout.elements(part)
            if count > _SAMPLE:
                elements, weight = islice(elements, 0, None, count // 100), weight * count / -(-count // (count // 100))
            stack.extend([(element, weight) for element in elements])
    return round(total)


def name_of(cls: type) -> str:
    """The class as a program refers to it."""
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"
