"""Finding out that a program repeats: the same operations, with results of the same sizes, in the same order.

The operations of the last period are compared with those of the one before; when a whole period has been the same, the
program repeats. A round then begins where least was missing of what it needs. A loop in which memory builds up, or is
used up, is a part of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from recompute._foresight.calls import call_of
from recompute.extend import Node

_CONTEXT: Final = 16
"""Operations in a row that are looked up to find a period."""
_MODULUS: Final = (1 << 61) - 1
_BASE: Final = 1_000_003
_GONE: Final = pow(_BASE, _CONTEXT, _MODULUS)
_LEAST: Final = 64
"""Operations that must have been the same, however short the period is."""
_STEADY: Final = 0.1
"""Of the memory that is wanted: what it may differ by from one round to the next."""
_MOST: Final = 200_000
"""Operations that are remembered."""

Load = tuple[int, int]
"""(bytes that are evicted but referred to, bytes in use)."""


class Repetition:
    """Sees operations one at a time."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # of the operations that are remembered
        self._loads: list[Load] = []  # before each
        self._forgotten = 0  # operations before these
        self._seen: dict[int, int] = {}  # hash of operations in a row -> number of the last one
        self._context = 0
        self._period = 0
        self._same = 0  # operations that were as those one period before
        self._phase = -1  # of the operation with which rounds begin

    def see(self, operation: Node, load: Load) -> bool:
        """One more operation, and the load before it; whether the program repeats."""
        tokens = self._tokens
        token = hash((call_of(operation, _NOWHERE), *[argument.size for argument in operation.arguments]))
        at = len(tokens)
        number = self._forgotten + at
        tokens.append(token)
        self._loads.append(load)
        if self._period and at >= self._period and tokens[at - self._period] == token:
            self._same += 1
        else:
            self._period = self._same = 0
            self._phase = -1
        context = self._context = (self._context * _BASE + token) % _MODULUS
        if at >= _CONTEXT:
            context = self._context = (context - tokens[at - _CONTEXT] * _GONE) % _MODULUS
            before = self._seen.get(context)
            self._seen[context] = number
            if not self._period and before is not None:
                self._period = number - before
        if self._period and self._phase < 0 and self._same >= max(self._period, _LEAST) and self._is_steady():
            self._phase = (number + 1 + _beginning(self._loads[-self._period :])) % self._period
        if at >= _MOST:
            self._forget(_MOST // 2)
        return self._phase >= 0

    def _is_steady(self) -> bool:
        """Whether as much memory is wanted as whole periods ago: a loop inside of a round builds up, or uses up."""
        periods, within = divmod(self._same, self._period)
        if within:
            return False  # once in a period is often enough to look
        now, before = sum(self._loads[-1]), sum(self._loads[-1 - periods * self._period])
        return abs(now - before) <= _STEADY * max(now, before)

    def begins_here(self) -> bool:
        """Whether a round begins with the last operation that was seen."""
        return (self._forgotten + len(self._tokens) - 1) % self._period == self._phase

    def _forget(self, count: int) -> None:
        """The first so many operations that are remembered."""
        del self._tokens[:count]
        del self._loads[:count]
        self._forgotten += count
        self._seen = {context: number for context, number in self._seen.items() if number >= self._forgotten}


def _beginning(loads: Sequence[Load]) -> int:
    """Where a round begins: where least is missing, as long as that has been so; if always, at the least load."""
    place = loads.index(min(loads))
    for back in range(len(loads)):
        if loads[place - back - 1][0] != loads[place][0]:
            return (place - back) % len(loads)
    return place


_NOWHERE: Final[dict[Any, int]] = {}
