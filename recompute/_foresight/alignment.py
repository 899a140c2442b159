"""Which operation of a script an operation of the program is, in a round that may differ from it.

An operation is known by its function and by what it takes, so most are found wherever they come. Those that the
script does not have are let pass, and what takes their results is recognized by the rest of what it takes. A few
operations of the script may be left out; more of them are once two in a row are there that come later in it.
"""

from __future__ import annotations

from typing import Final

from recompute._foresight.calls import UNKNOWN, Call, call_of
from recompute._foresight.script import Script
from recompute.extend import Operation

_AHEAD: Final = 64
"""Operations of the script among which one is looked for that takes something unknown."""

_SOON: Final = 8
"""Operations that may be left out without doubt."""

_BEHIND: Final = 8
"""Operations just done, of which another one may be a repetition."""


class Alignment:
    """Sees the operations of one round."""

    def __init__(self, script: Script) -> None:
        self.nodes: list[Operation | None] = [None] * len(script.calls)
        """Operation of the script -> the one of this round that it is."""
        self.places: dict[Operation | None, int] = {}
        """Operation of this round -> the one of the script that it is, or `UNKNOWN`."""
        self.next = 0
        """The operation that the script has next."""
        self.unknown = 0
        """Operations that did not come next."""
        self._calls = script.calls
        self._where = script.where
        self._ahead = -2  # the last one that came too early, which may be an accident

    def find(self, operation: Operation) -> int:
        """Which one of the script this is; those behind it come next. -1: none, or it is not sure. O(arguments)."""
        calls, nodes, place = self._calls, self.nodes, self.next
        call = call_of(operation, self.places)
        while place < len(calls) and calls[place] != call and (calls[place] is None or nodes[place] is not None):
            place += 1  # what a function did in the cache, and what came too early
        if place == len(calls) or (calls[place] != call and not self._fits(call, place)):
            self.unknown += 1
            tells = max(call[1:], default=UNKNOWN) >= 0  # it takes something that was made in this round
            found = self._out_of_order(call, place, tells=tells)
            if found < 0 or not ((tells and found < place + _SOON) or found == self._ahead + 1):
                self._let_pass(operation, call, found)
                return -1
            place = found
        if UNKNOWN in call:
            self._learn(operation, place)
        self._ahead = -2
        nodes[place] = operation
        self.places[operation] = place
        self.next = place + 1
        return place

    def _out_of_order(self, call: Call, place: int, *, tells: bool) -> int:
        """The first one after a place that may be this call and has not been there, else one before it; -1: none."""
        known = self._where.get(call, ())
        near = range(place - _AHEAD, len(self._calls)) if tells else range(place, place + _SOON)
        free = [at for at in known if at in near and self.nodes[at] is None]
        later = next((at for at in free if at > place), -1)
        if later < 0 and UNKNOWN in call:
            window = range(place + 1, min(len(self._calls), place + 1 + _AHEAD))
            later = next((at for at in window if self.nodes[at] is None and self._fits(call, at)), -1)
        return free[0] if later < 0 and free else later

    def _fits(self, call: Call, place: int) -> bool:
        """Whether a call may be one of the script but for unknown arguments, which then are what that one takes."""
        expected = self._calls[place]
        return (
            UNKNOWN in call
            and expected is not None
            and len(call) == len(expected)
            and call[0] == expected[0]
            and all(
                mine == other or (mine == UNKNOWN and other >= 0)
                for mine, other in zip(call[1:], expected[1:], strict=True)
            )
        )

    def _learn(self, operation: Operation, place: int) -> None:
        """What unknown arguments are: what the script has in their place."""
        expected = self._calls[place]
        for argument, other in zip(operation.arguments, expected[1:] if expected else (), strict=False):
            if self.places.get(argument.operation) == UNKNOWN:
                self.places[argument.operation] = other
                self.nodes[other] = argument.operation

    def _let_pass(self, operation: Operation, call: Call, place: int) -> None:
        """An operation that comes too early, one that was there just now, or a new one."""
        if place < 0:
            behind = range(self.next - 1, max(-1, self.next - 1 - _BEHIND), -1)
            place = next((at for at in behind if self._calls[at] == call), UNKNOWN)
        else:
            self._ahead = place
        self.places[operation] = place
        if place >= 0:
            self.nodes[place] = operation
