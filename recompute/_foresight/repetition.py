"""Finding out that a program repeats: the same operations on the same sizes in the same order, with `get`s between.

An operation is compared with the one a period before; a period is how long ago the last operations came in this order.
Whether the program got a value just before is part of what an operation is known by: a period without the `get`s of the
round would be one of a loop inside it. Neither is one in which memory builds up, or is used up.

A round begins where least was missing, and least in memory. From then on each begins with that operation, also
after a round that was another one. Compiled, since every operation passes here once memory is short.
"""

from __future__ import annotations

from array import array
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from recompute import extend
from recompute._foresight.recording import name_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

NOTHING: Final = 0
BEGINS: Final = 1
"""A round begins with this operation."""
LOST: Final = 2
"""The program does not repeat any more."""

_CONTEXT: Final = 16
"""Operations in a row that are looked up to find a period."""

_LEAST: Final = 48
"""Operations that must have been the same, however short the period is; of a long one, half of it."""

_SHORTEST: Final = 16
"""Operations of a round, at least: to begin one takes more than a short one could save."""

_FIRST: Final = 1 << 10
"""Operations that there is room for at first."""

_MODULUS: Final = (1 << 31) - 1
_BASE: Final = 1_000_003
_GONE: Final = pow(_BASE, _CONTEXT, _MODULUS)

_GROWTH: Final = 0.1
"""Of what a loop makes: how much more of it is kept if memory builds up."""

_LOW: Final = 0.25
"""Of the way from the least memory that a round wants to the most: below this it may have begun."""

_PATIENCE: Final = 8
"""Rounds, and so many times `_CONTEXT` operations, without one as before, after which the program does not repeat."""


class Repetition:
    """Sees the operations of one thread, and remembers `most` of them, a power of two: 32 bytes each.

    `tell(operation, what)`: of all while `inside`, else where rounds begin.
    """

    __slots__ = (
        "_context",
        "_engine",
        "_first",
        "_lap",
        "_last_place",
        "_length",
        "_loads",
        "_look_at",
        "_low",
        "_mask",
        "_missing",
        "_most",
        "_number",
        "_off",
        "_period",
        "_pools",
        "_position",
        "_reads",
        "_same",
        "_tell",
        "_thread",
        "_tokens",
        "inside",
        "useful",
        "whole",
    )

    def __init__(self, engine: Any, tell: Callable[[extend.Operation, int], None] | None, most: int = 1 << 17) -> None:
        self._engine = engine
        self._tell = tell
        self._thread = get_ident()
        self.inside = False
        """Whether all operations are told of."""
        self.useful = False
        """Whether a plan of these rounds is followed: else they may be those of a loop inside the round."""
        self.whole = True
        """Whether the round before the one that begins was about as long as they are."""
        self._pools: tuple[extend.Pool, ...] = ()  # of all devices
        self._reads = 0  # `Engine.reads` at the last operation
        self._number = 0  # of operations
        self._most = most
        size = min(most, _FIRST)
        zeros = bytes(8 * size)
        self._mask = size - 1
        self._tokens = array("q", zeros)  # of the last ones: a ring
        self._missing = array("q", zeros)  # bytes that were evicted but referred to before each
        self._loads = array("q", zeros)  # and those in memory
        self._last_place = array("q", zeros)  # hash of operations in a row -> number behind the last one, or 0
        self._context = 0
        self._period = 0
        self._same = 0  # operations that were as those one period before
        self._look_at = 0  # the operation at which it may be found that the period is a round
        self._lap = 0  # the period of which rounds are made; 0: of none
        self._length = 0  # of a round
        self._position = 0  # in the round
        self._first = 0  # the operation with which it begins
        self._low = 0  # bytes that are wanted then, at most
        self._off = 0  # operations since the period was another one

    def before(self, operation: extend.Operation) -> None:
        """An operation is about to run for the first time."""
        engine = self._engine
        assert self._tell is not None
        if get_ident() != self._thread or (engine.scheduler.stacks and extend.running() is not None):
            return
        memory = engine.memory
        if len(self._pools) != len(memory.pools):
            self._pools = tuple(memory.pools.values())
        used = 0
        for pool in self._pools:
            used += pool.used - pool.sources
        reads = engine.reads
        what = self.see(2 * _token(operation) + (reads != self._reads), memory.neighbourhood.missing, used)
        self._reads = reads
        if what or self.inside:
            self._tell(operation, what)

    def see(self, token: int, missing: int, used: int) -> int:
        """One more operation, and the memory before it, but for sources. An odd token: something was got before."""
        number = self._number
        self._number = number + 1
        if number > self._mask and self._mask + 1 < self._most:
            self._grow()
        place = number & self._mask
        gone = self._tokens[(number - _CONTEXT) & self._mask] if number >= _CONTEXT else 0
        self._tokens[place] = token
        self._missing[place] = missing
        self._loads[place] = used
        self._compare(number, token)
        context = (self._context * _BASE + token) % _MODULUS
        self._context = context = (context + _MODULUS - gone % _MODULUS * _GONE % _MODULUS) % _MODULUS
        place = context & self._mask
        before = self._last_place[place] - 1
        self._last_place[place] = number + 1
        if not self._period and number >= _CONTEXT and before >= _CONTEXT - 1:
            self._try(number, before)
        if not self._lap:
            if not self._is_round(number):
                return NOTHING
            self._adopt(number)
        return self._go_on(number, token, missing + used)

    def _grow(self) -> None:
        """Room for twice as many operations, of which none has been forgotten so far."""
        size = self._mask + 1
        self._mask = 2 * size - 1
        self._tokens, self._missing = _longer(self._tokens), _longer(self._missing)
        self._loads = _longer(self._loads)
        self._last_place = array("q", bytes(16 * size))
        context = 0
        for number in range(size):
            gone = self._tokens[number - _CONTEXT] if number >= _CONTEXT else 0
            context = (context * _BASE + self._tokens[number]) % _MODULUS
            context = (context + _MODULUS - gone % _MODULUS * _GONE % _MODULUS) % _MODULUS
            self._last_place[context & self._mask] = number + 1

    def _compare(self, number: int, token: int) -> None:
        """With the operation one period before."""
        period = self._period
        if not period:
            return
        if self._tokens[(number - period) & self._mask] == token:
            self._same += 1
        else:
            self._period = self._same = 0

    def _try(self, number: int, before: int) -> None:
        """The period from where the last operations seem to have come before, and how long it has been one."""
        period = number - before
        most = min(max(period, _LEAST), before + 1, self._mask - period)
        same = 0
        while same < most:
            if self._tokens[(number - same) & self._mask] != self._tokens[(before - same) & self._mask]:
                break
            same += 1
        if same >= _CONTEXT:
            self._period, self._same = period, same
            self._look_at = number

    def _is_round(self, number: int) -> bool:
        """Whether the period is one of rounds: asked once in a period, since it looks at all of it."""
        period = self._period
        enough = _LEAST if period < _SHORTEST else max(period // 2, _CONTEXT)
        if not period or number < self._look_at or self._same < enough:
            return False
        whole = period if period >= _SHORTEST else period * (_LEAST // period)
        self._look_at = number + whole
        return self._is_steady(number, whole)

    def _is_steady(self, number: int, whole: int) -> bool:
        """Whether as much memory is wanted as a few periods ago, but for a small share of what was made since."""
        made = 0
        first = number - whole
        if first < 0:
            return False
        start = last = self._wanted(first)
        for at in range(first + 1, number + 1):
            now = self._wanted(at)
            if now > last:
                made += now - last
            last = now
        grown = max(last - start, start - last)
        return grown <= _GROWTH * made

    def _wanted(self, number: int) -> int:
        """Bytes that were in memory or missing before an operation."""
        place = number & self._mask
        return self._missing[place] + self._loads[place]

    def _adopt(self, number: int) -> None:
        """Take this period: where the next round begins."""
        period = self._period
        begins = self._beginning(number, period)
        self._lap, self._length = period, period * -(-_SHORTEST // period)
        self._first = self._tokens[begins & self._mask]
        most = 0
        for at in range(number - period + 1, number + 1):
            most = max(most, self._wanted(at))
        least = self._wanted(begins)
        self._low = least + max(least // 10, int(_LOW * (most - least)))
        self._position = self._length - 1 - (begins + period - number) % period
        self._off = 0
        self.whole = True

    def _beginning(self, number: int, period: int) -> int:
        """Where least is missing; of these, where least is in memory."""
        best = number - period + 1
        for at in range(best + 1, number + 1):
            one, other = at & self._mask, best & self._mask
            more = self._missing[one] - self._missing[other]
            if more < 0 or (not more and self._loads[one] < self._loads[other]):
                best = at
        return best

    def _go_on(self, number: int, token: int, wanted: int) -> int:
        """In rounds: whether one begins, or they are over."""
        self._position += 1
        position, length = self._position, self._length
        in_step = self._period == self._lap
        low = wanted <= self._low
        self._off = 0 if in_step else self._off + 1
        if token == self._first:
            begins = position >= length or (low and not in_step and 2 * position >= length)
        else:  # but for what was got just before
            begins = low and position == length and token // 2 == self._first // 2
        if begins and position >= _SHORTEST:
            self._position = self._off = 0
            self.whole = 2 * position < 3 * length
            return BEGINS
        if in_step:
            return NOTHING
        longer = not self.useful and self._period > self._lap and self._same >= self._period
        other = longer or self._off > 2 * length
        if self._off > _PATIENCE * (length + _CONTEXT) or (other and self._is_round(number)):
            self._lap = 0
            self._look_at = 0
            return LOST
        return NOTHING


def _longer(ring: Any) -> Any:
    """Twice as long, with zeros behind."""
    return array("q", bytes(memoryview(ring)) + bytes(8 * len(ring)))


def _token(operation: extend.Operation) -> int:
    """The same for the same function on arguments of the same sizes: less than `_MODULUS`."""
    code = getattr(operation.function, "__code__", None)
    name = hash(name_of_call(operation.function)) if code is None else id(code)
    name = (name >> 4) & _MODULUS
    for argument in operation.arguments:
        size = argument.storage.size
        name = ((name ^ (size & _MODULUS) ^ (size >> 31)) * _BASE + 1) % _MODULUS
    return name
