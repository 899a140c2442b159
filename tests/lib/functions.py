"""The functions that programs are made of: each takes any number of payloads, whatever these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final

from lib.vectors import Vector, vector

_MODULUS: Final = 97


def numbers(payload: Any) -> tuple[int, ...]:
    """Any payload as numbers, so that every function takes every payload."""
    if isinstance(payload, Vector):
        return payload.numbers
    if isinstance(payload, int):
        return (payload,)
    if isinstance(payload, BaseException):
        return numbers(payload.args)
    if isinstance(payload, (tuple, list)):
        return tuple(number for part in payload for number in numbers(part))
    return ()


def _first(parts: Sequence[Any]) -> Vector:
    """The first vector among the payloads, itself; a fresh one if there is none."""
    for part in parts:
        if isinstance(part, Vector):
            return part
    return vector(*numbers(list(parts))[:3])


def _device(parts: Sequence[Any]) -> str:
    return str(_first(parts).buffer.device)


def _add(run: int, *parts: Any) -> Any:
    rows = map(numbers, parts)
    sums = [sum(column) % _MODULUS for column in zip_longest(*rows, fillvalue=1)]
    return vector(*sums[:6], device=_device(parts))


def _scale(run: int, *parts: Any) -> Any:
    return vector(*(3 * number % _MODULUS for number in numbers(list(parts))[:4]), device=_device(parts))


def _grow(run: int, *parts: Any) -> Any:
    return vector(*(numbers(list(parts)) * 3)[:9], device=_device(parts))


def _move(run: int, *parts: Any) -> Any:
    return vector(*numbers(list(parts))[:4], device="cpu" if _device(parts) == "gpu:0" else "gpu:0")


def _count(run: int, *parts: Any) -> Any:
    return len(numbers(list(parts)))


def _nothing(run: int, *parts: Any) -> Any:
    return None


def _complaint(run: int, *parts: Any) -> Any:
    return ValueError(*numbers(list(parts))[:2])


def _head(run: int, *parts: Any) -> Any:
    return vector(numbers(list(parts))[1], device=_device(parts))  # IndexError if there is none


def _itself(run: int, *parts: Any) -> Any:
    return _first(parts)


def _tail(run: int, *parts: Any) -> Any:
    return _first(parts).view(1)


def _halves(run: int, *parts: Any) -> Any:
    row, device = numbers(list(parts))[:6], _device(parts)
    return vector(*row[: len(row) // 2], device=device), vector(*row[len(row) // 2 :], device=device)


def _windows(run: int, *parts: Any) -> Any:
    one = _first(parts)
    return one.view(0, 2), one.view(1)


def _twins(run: int, *parts: Any) -> Any:
    one = vector(*numbers(list(parts))[:5], device=_device(parts))
    return one.view(0, 3), one.view(2)


def _pair(run: int, *parts: Any) -> Any:
    one = vector(*numbers(list(parts))[:3], device=_device(parts))
    return [one, one]


def _mixture(run: int, *parts: Any) -> Any:
    return _first(parts), _move(run, *parts), None


def _swelling(run: int, *parts: Any) -> Any:
    """The same value in every run, and more bytes in every other."""
    return vector(*numbers(list(parts))[:3], device=_device(parts), slack=12 * (run % 2))


def _restless(run: int, *parts: Any) -> Any:
    """The same value in every run, now as a view of the argument, now as a copy."""
    one = _first(parts)
    copy = vector(*one.numbers, device=one.buffer.device)
    return (one, copy) if run % 3 == 0 else (copy, one) if run % 3 == 1 else (copy, copy)


def inner(payload: Any) -> Any:
    """What programs apply inside of functions."""
    return _scale(1, payload)


FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], int]]] = {
    "add": (_add, 1),
    "scale": (_scale, 1),
    "grow": (_grow, 1),
    "move": (_move, 1),
    "count": (_count, 1),
    "nothing": (_nothing, 1),
    "complaint": (_complaint, 1),
    "head": (_head, 1),
    "itself": (_itself, 1),
    "tail": (_tail, 1),
    "halves": (_halves, 2),
    "windows": (_windows, 2),
    "twins": (_twins, 2),
    "pair": (_pair, 2),
    "mixture": (_mixture, 3),
    "swelling": (_swelling, 1),
    "restless": (_restless, 2),
}
"""Name -> function of (number of the run, *payloads), and how many outputs it has."""

FICKLE: Final = frozenset({"swelling", "restless"})
"""Those whose results are equal from run to run, but not in the memory that they take."""
