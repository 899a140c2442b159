"""Budgets: one reader for every place that takes one, and a budget that follows the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import index
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fractions import Fraction

Limit = int | Callable[[int], int]
"""Bytes, or a function from the bytes in use now to the bytes allowed now."""

Amount = int | float | str
"""Bytes, a share, or text for either: what `parse_budget` reads."""

Budget = Amount | Callable[[int], int] | None
"""What people write: an amount, a function, or None for unlimited."""

_UNITS: Final = {"b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for unit, base in (("", 1000), ("b", 1000), ("ib", 1024), ("i", 1024))
}
_TEXT: Final = re.compile(
    r"\s*((?:[0-9][0-9_]{0,40}\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,2})?)\s*([a-z]*|%)\s*", re.IGNORECASE
)
_MOST: Final = 10**300
"""Bytes: a float holds no more."""
_BYTES: Final = "for bytes give text such as '512MB', or an int"


def parse_budget(
    budget: Any,
    *,
    whole: Callable[[], int | None] | int | None = None,
    of: str = "memory",
    what: str = "budget",
) -> int:
    """The bytes of a budget.

    An int is bytes, and so is text with a unit: "512MB" (10^6), "1.5 GiB" (2^30). A float above 0 and at most 1 is a
    share of `whole`, and so is a percentage: "50%". Any other float is an error. A number as text means the number:
    "0.5", "1000".

    Parameters
    ----------
    whole
        The bytes that a share refers to, or a function that finds them, called only if needed; None: unknown.
    of, what
        What they are, and what the budget is called, in errors.

    A share is rounded down, to at least one byte. Raises ValueError or TypeError, with the cure.
    """
    number = bytes_or_share(budget, what)
    if isinstance(number, int):
        return number
    size = whole() if callable(whole) else whole
    if size is None:
        raise ValueError(f"{what} {budget!r} is a share of {of}, whose size is not known here; {_BYTES}")
    return max(1, int(_exact(repr(number)) * size))


def bytes_or_share(budget: Any, what: str = "budget") -> int | float:
    """A budget as the number that it stands for: bytes are an int, at least 1; a share is a float, above 0, at most 1.

    For callers that learn only later what a share refers to. Raises as `parse_budget` does.
    """
    number = _number(budget, what)
    if isinstance(number, int):
        if number < 1:
            raise ValueError(f"{what} must be at least one byte, not {budget!r}")
    elif not 0 < number <= 1:
        raise ValueError(f"{what} {budget!r} is no share, which is above 0 and at most 1 (100%); {_BYTES}")
    return number


def bytes_or_peak(budget: int | str | None, of_peak: float | str | None) -> int | float:
    """The budget of what is planned in advance: bytes (an int), or the share of a peak that `of_peak` is (a float).

    Raises TypeError unless exactly one of them is given, ValueError for a share as the budget, or bytes as the share.
    """
    if (budget is None) == (of_peak is None):
        raise TypeError("give either a budget in bytes, such as '512MB', or a share of the peak, such as of_peak=0.5")
    if budget is None:
        share = _number(of_peak, "of_peak")
        if not 0 < share <= 1 or (isinstance(of_peak, str) and isinstance(share, int)):
            raise ValueError(f"of_peak {of_peak!r} is no share, which is above 0 and at most 1; bytes are the budget")
        return float(share)
    number = bytes_or_share(budget)
    if isinstance(number, float):
        raise ValueError(f"budget {budget!r} is a share; a share of the peak is given as of_peak={number:g}")
    return number


def _number(budget: Any, what: str) -> int | float:
    number = _as_given(budget, what)
    if isinstance(number, int) and abs(number) > _MOST:
        raise ValueError(f"{what} is larger than any memory; {_BYTES}")
    return number


def _as_given(budget: Any, what: str) -> int | float:
    if isinstance(budget, str):
        return _read(budget, what)
    if getattr(budget, "ndim", None) == 0:  # a number of an array library
        budget = budget.item()
    if isinstance(budget, float):
        return float(budget)
    if not isinstance(budget, bool):
        with suppress(TypeError):
            return index(budget)
    raise TypeError(f"{what} must be bytes (an int), a share (a float) or text such as '512MB', not {budget!r}")


def _read(text: str, what: str) -> int | float:
    match = _TEXT.fullmatch(text)
    number, unit = (match[1].replace("_", ""), match[2].lower()) if match else ("", "?")
    if unit in _UNITS:
        return int(_exact(number) * _UNITS[unit])
    if unit == "%":
        return float(_exact(number) / 100)
    if unit:
        raise ValueError(
            f"{what} {text!r} is not a size; give bytes, text such as '512MB' or '1.5 GiB', or a share such as '50%'"
        )
    return int(number) if number.isdecimal() else float(number)


def _exact(number: str) -> Fraction:
    """What is written, not what a float makes of it: 29 % of 100 bytes are 29, though int(0.29 * 100) is 28."""
    from fractions import Fraction  # takes milliseconds: not before there is text or a share

    return Fraction(number)


def parse_bytes(size: object, what: str = "budget") -> int:
    """Bytes where a share makes no sense; see `parse_budget`."""
    return parse_budget(size, what=what)


def format_bytes(size: float) -> str:
    """Bytes for people: "1.50 MB" (10^6)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"


def device_memory(device: str) -> int | None:
    """All bytes of a device, free or not, or None if it is unknown: Python alone knows only the machine's memory."""
    if device != "cpu":
        return None
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().total)


class available:  # reads as a function: budget=rc.available(0.8)
    """A budget that follows the free memory of the machine, so that several processes can share it.

    The budget is `fraction` (0.8 or "80%") of what the cache uses now plus what the machine has free now: when other
    programs need memory it shrinks, when they end it grows. `probe` returns the free bytes; the default asks psutil
    (the extra `adaptive`). It is called again when `seconds` have passed or when usage has changed by 1 % of the last
    answer.
    """

    def __init__(
        self, fraction: float | str = 0.8, *, probe: Callable[[], int] | None = None, seconds: float = 0.1
    ) -> None:
        share = bytes_or_share(fraction, "fraction") if isinstance(fraction, str) else fraction
        if not 0 < share <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {fraction!r}")
        self.fraction = share
        self.seconds = seconds
        self._probe = probe or free_memory()
        self._asked = -1.0
        self._used = 0
        self._limit = 0

    def __call__(self, used: int) -> int:
        now = monotonic()
        if now - self._asked >= self.seconds or self._asked < 0 or abs(used - self._used) * 100 > self._limit:
            self._limit = max(1, int(self.fraction * (used + self._probe())))
            self._asked = now
            self._used = used
        return self._limit

    def __repr__(self) -> str:
        return f"available(fraction={self.fraction})"


def free_memory() -> Callable[[], int]:
    try:
        import psutil
    except ImportError:
        raise ImportError(
            "a budget that follows the machine needs psutil: pip install '.[adaptive]' in a checkout, "
            "or give available(probe=...) a function that returns the free bytes"
        ) from None
    return lambda: int(psutil.virtual_memory().available)


def check_takes(function: Callable[..., object], count: int, what: str, arguments: str) -> None:
    """Raise TypeError for a function that cannot be called with so many arguments, as far as it says."""
    from inspect import signature  # which takes longer to import than this module

    try:
        signature(function).bind(*[0] * count)
    except TypeError:
        raise TypeError(f"{what} {function!r} must take {arguments}") from None
    except ValueError:
        return  # a function in C that does not say what it takes


class Limits:
    """A budget as given, checked, and what it means for a device.

    A share is one of the memory of each device. `memory` says how many bytes that is (None: unknown), and is asked when
    the device is first seen: to look for devices may be to start a framework.
    """

    def __init__(self, budget: Any, memory: Callable[[str], int | None] = device_memory) -> None:
        self._memory = memory
        self._devices: dict[str, Limit | float | None] | None = None
        self._everywhere: Limit | float | None = None
        if isinstance(budget, Mapping):
            for device in budget:
                if not isinstance(device, str):
                    raise TypeError(f"a budget by device maps names such as 'cpu' to sizes, not {device!r}")
            self._devices = {device: _limit(limit) for device, limit in budget.items()}
        else:
            self._everywhere = _limit(budget)

    @property
    def given(self) -> Any:
        """What was given, with text as the number that it stands for."""
        return self._everywhere if self._devices is None else dict(self._devices)

    def of(self, device: str) -> Limit | None:
        """The limit of one device; None: unlimited. Raises ValueError for a share of what is not known."""
        limit = self._everywhere if self._devices is None else self._devices.get(device)
        if not isinstance(limit, float):
            return limit
        return parse_budget(limit, whole=lambda: self._memory(device), of=f"the memory of {device}")

    def __repr__(self) -> str:
        if self._devices is not None:
            return f"{self._devices}"
        if isinstance(self._everywhere, int):
            return format_bytes(self._everywhere)
        if isinstance(self._everywhere, float):
            return f"{100 * self._everywhere:.4g}% of the memory"
        return "unlimited" if self._everywhere is None else repr(self._everywhere)


def _limit(budget: Any) -> Limit | float | None:
    if budget is None:
        return None
    if not callable(budget):
        return bytes_or_share(budget)
    check_takes(budget, 1, "the budget function", "one number, the bytes in use: as lambda used: used + 10**6")
    function: Callable[[int], int] = budget
    return function
