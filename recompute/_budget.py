"""Budgets: bytes from numbers and text, and a budget that follows the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from time import monotonic
from typing import Any, Final

Limit = int | Callable[[int], int]
"""Bytes, or a function from the bytes in use now to the bytes allowed now."""

Budget = int | float | str | Callable[[int], int] | None
"""What people write: bytes, text, a function, or None for unlimited."""

_UNITS: Final = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for unit, base in (("", 1000), ("b", 1000), ("ib", 1024), ("i", 1024))
}
_TEXT: Final = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: object, what: str = "budget") -> int:
    """Bytes from 1_000_000, 1e6, "1000000", "512MB" (10^6) or "1.5 GiB" (2^30). Positive and finite, or ValueError."""
    number: float
    if isinstance(size, str):
        match = _TEXT.fullmatch(size)
        unit = match and _UNITS.get(match[2].lower())
        if not match or not unit:
            raise ValueError(f"{what} {size!r} is not a size; write bytes, or text such as '512MB' or '1.5 GiB'")
        number = float(match[1].replace("_", "")) * unit
    elif isinstance(size, bool) or (not hasattr(size, "__index__") and not isinstance(size, float)):
        raise TypeError(f"{what} must be bytes, text such as '512MB', or None for unlimited, not {size!r}")
    else:
        number = size if isinstance(size, float) else size.__index__()
    if not isfinite(number):
        raise ValueError(f"{what} {size!r} is not a number of bytes; use None for unlimited")
    if number < 1:
        raise ValueError(f"{what} must be at least one byte, not {size!r}; use None for unlimited")
    return int(number)


def format_bytes(size: float) -> str:
    """Bytes for people: "1.50 MB" (10^6)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"


class available:  # reads as a function: budget=rc.available(0.8)
    """A budget that follows the free memory of the machine, so that several processes can share it.

    The budget is `fraction` of what the cache uses now plus what the machine has free now: when others need memory it
    shrinks, when they leave it grows. `probe` returns the free bytes; the default asks psutil (the extra `adaptive`).
    It is asked again when `seconds` have passed or when usage has changed by 1 % of the last answer.
    """

    def __init__(self, fraction: float = 0.8, *, probe: Callable[[], int] | None = None, seconds: float = 0.1) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {fraction!r}")
        self.fraction = fraction
        self.seconds = seconds
        self._probe = probe or _free_memory()
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


def _free_memory() -> Callable[[], int]:
    try:
        import psutil
    except ImportError:
        raise ImportError(
            "a budget that follows the machine needs psutil: pip install 'recompute-cache[adaptive]', "
            "or give available(probe=...) a function that returns the free bytes"
        ) from None
    return lambda: int(psutil.virtual_memory().available)


class Limits:
    """A budget as given, checked, and what it means for a device."""

    def __init__(self, budget: Any) -> None:
        self.devices: dict[str, Limit | None] | None = None
        self.everywhere: Limit | None = None
        if isinstance(budget, Mapping):
            for device in budget:
                if not isinstance(device, str):
                    raise TypeError(f"a budget by device maps names such as 'cpu' to sizes, not {device!r}")
            self.devices = {device: _limit(each) for device, each in budget.items()}
        else:
            self.everywhere = _limit(budget)

    @property
    def given(self) -> Any:
        return self.everywhere if self.devices is None else dict(self.devices)

    def of(self, device: str) -> Limit | None:
        return self.everywhere if self.devices is None else self.devices.get(device)

    def __repr__(self) -> str:
        if self.devices is not None:
            return f"{self.devices}"
        if isinstance(self.everywhere, int):
            return format_bytes(self.everywhere)
        return "unlimited" if self.everywhere is None else repr(self.everywhere)


def _limit(budget: Any) -> Limit | None:
    return budget if budget is None or callable(budget) else parse_bytes(budget)
