"""Interrupts wherever Python looks for signals: when a function is entered, and when it has returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType
from typing import Any

import pytest


def strike() -> None:
    """What the handler of a signal does in the end."""
    raise KeyboardInterrupt


class Interrupts:
    """Strikes at the n-th crossing into or out of some functions; never before `arm` says which.

    Deterministic, unlike a timer, and safe, unlike a tracer. `strike` raises, or sends a signal.
    """

    def __init__(self, strike: Callable[[], None] = strike) -> None:
        self.crossings = 0
        self.strikes_at = 0
        self._strike = strike

    def arm(self, crossing: int) -> None:
        """Count from 0 again, and strike at this crossing; 0: never."""
        self.crossings, self.strikes_at = 0, crossing

    def let_in(
        self, monkeypatch: pytest.MonkeyPatch, holders: Iterable[Any], where: Callable[[FunctionType, str], bool]
    ) -> None:
        """At the functions that modules or classes hold by these names."""
        around: dict[FunctionType, Any] = {}  # one function may be held by several
        for holder in holders:
            for name, function in list(vars(holder).items()):
                if isinstance(function, FunctionType) and where(function, name):
                    around.setdefault(function, self._around(function))
                    monkeypatch.setattr(holder, name, around[function])

    def _around(self, function: FunctionType) -> Any:
        @wraps(function)
        def crossed(*args: Any, **kwargs: Any) -> Any:
            self._cross()
            result = function(*args, **kwargs)
            self._cross()
            return result

        return crossed

    def _cross(self) -> None:
        self.crossings += 1
        if self.crossings == self.strikes_at:
            self._strike()
