"""A script, which is a plan of one round as it is followed, and the alignment of a round with it, which may differ.

An operation is known by its function and by what it takes, so most are found wherever they come. Those that the script
does not have are let pass, and what takes their results is recognized by the rest of what it takes. A few operations of
the script may be left out; more of them are once two in a row are there that come later in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from recompute._foresight.recording import UNKNOWN, Call, Round, call_of
from recompute._plans.liveness import frees_after, outputs_used
from recompute._plans.problem import Problem
from recompute._traces.program import Program
from recompute.extend import Operation

_TIGHT: Final = 1.3
"""Times the least memory."""

Act = tuple[Literal["again", "free", "get"], int, tuple[int, ...]]
"""Run a call again, for the outputs with these numbers; a storage is not needed for the time being; an output of a call
is got here."""


@dataclass(frozen=True)
class Script:
    """A round as it is to be run. Operations are numbered in the order of their first runs."""

    calls: Sequence[Call | None]
    """How each is known."""
    where: Mapping[Call, Sequence[int]]
    """The operations that are known in the same way."""
    sizes: Sequence[int]
    """Bytes on memory of its own that each makes."""
    acts: Sequence[Sequence[Act]]
    """What is done before each operation, in order; the last ones at the end of the round."""
    makes: Sequence[Sequence[int]]
    """The storages of the outputs of each."""
    values: Sequence[Sequence[tuple[int, int]]]
    """Storage -> (operation, number of the output) of the values on it."""
    uses: Sequence[Sequence[int]]
    """Storage -> the operations before which something takes it, or that take it themselves."""
    outlives: Sequence[Sequence[int]]
    """The storages that each makes and that are used when the program has dropped the values on them."""
    sequence: Sequence[int]
    """All runs, as the planner numbers them."""
    cost: float
    """Seconds of all runs."""
    spent: Sequence[float]
    """Seconds of the repeated runs before each operation, and to the end."""
    model_cost: float
    """Seconds of the first runs."""
    tight: bool
    """Whether there is hardly more memory than any order of runs needs."""

    @property
    def overhead(self) -> float:
        """All compute divided by that of the first runs."""
        return self.cost / self.model_cost if self.model_cost else 1.0


def script_of(recorded: Round, problem: Problem, sequence: Sequence[int]) -> Script:
    """The script of an order of runs. O(arguments)."""
    program = recorded.program
    wanted = outputs_used(problem, sequence)
    gets = {number: value for (_, value), numbers in problem.named.items() for number in numbers}
    acts: list[list[Act]] = [[] for _ in range(problem.calls + 1)]
    repeated = [0.0] * (problem.calls + 1)
    uses: list[list[int]] = [[] for _ in program.sizes]
    seen: set[int] = set()
    following = _following(problem.calls, recorded.lazy)
    here, at = 0, following[0]  # the newest operation of the program, and the next one
    for place, (operation, frees) in enumerate(zip(sequence, frees_after(problem, sequence), strict=True)):
        if operation < problem.calls:
            if operation in seen:
                acts[at].append(("again", operation, wanted[place]))
                repeated[at] += problem.costs[operation]
            else:
                seen.add(operation)
                if operation not in recorded.lazy:
                    here, at = operation, following[operation + 1]
        elif operation in gets:
            maker = program.makers[gets[operation]]
            acts[at].append(("get", maker, (program.calls[maker].results.index(gets[operation]),)))
        for value in problem.arguments[operation]:
            taken = uses[problem.storages[value]]
            if not taken or taken[-1] < here:
                taken.append(here)
        acts[at] += [("free", storage, ()) for storage in frees]
    values: list[list[tuple[int, int]]] = [[] for _ in program.sizes]
    for number, call in enumerate(program.calls):
        for output, value in enumerate(call.results):
            values[program.storages[value]].append((number, output))
    where: defaultdict[Call, list[int]] = defaultdict(list)
    for number, known in enumerate(recorded.calls):
        if known is not None:
            where[known].append(number)
    return Script(
        calls=recorded.calls,
        where=dict(where),
        sizes=[problem.needs[number] for number in range(problem.calls)],
        acts=acts,
        makes=[[program.storages[value] for value in call.results] for call in program.calls],
        values=values,
        uses=uses,
        outlives=_outlives(program, uses),
        sequence=sequence,
        cost=recorded.model_cost + sum([problem.costs[operation] for operation in sequence]) - problem.model_cost,
        spent=list(accumulate(repeated)),
        model_cost=recorded.model_cost,
        tight=problem.constant + problem.room < _TIGHT * problem.least,
    )


def _following(calls: int, lazy: Set[int]) -> list[int]:
    """Number -> the next call from there on that runs where the program has it; `calls`: there is none."""
    following = [calls] * (calls + 1)
    for number in range(calls - 1, -1, -1):
        following[number] = following[number + 1] if number in lazy else number
    return following


def _outlives(program: Program, uses: Sequence[Sequence[int]]) -> list[list[int]]:
    """Call -> the storages that it makes first and that are used when all values on them have been dropped."""
    left = Counter(program.storages)
    dropped: dict[int, int] = {}  # storage -> calls before that
    calls = 0
    for kind, which in program.steps:
        if kind == "call":
            calls += 1
        elif kind == "drop":
            storage = program.storages[which]
            left[storage] -= 1
            if not left[storage]:
                dropped[storage] = calls
    makers: dict[int, int] = {}
    for storage, maker in zip(program.storages, program.makers, strict=True):
        makers.setdefault(storage, maker)
    outliving: list[list[int]] = [[] for _ in program.calls]
    for storage, when in dropped.items():
        if uses[storage] and uses[storage][-1] >= when and makers[storage] >= 0:
            outliving[makers[storage]].append(storage)
    return outliving


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
            other = self._out_of_order(call, place, tells=tells)
            if other < 0 or not ((tells and other < place + _SOON) or other == self._ahead + 1):
                self._let_pass(operation, call, other)
                return -1
            place = other
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
