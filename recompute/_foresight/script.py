"""A plan of one round, in the form in which it is followed: what to do before each operation, and what may go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from recompute._foresight.calls import Call
from recompute._foresight.recording import Round
from recompute._plans.liveness import frees_after, outputs_used
from recompute._plans.problem import Problem
from recompute._traces.program import Program

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
    found = [calls] * (calls + 1)
    for number in range(calls - 1, -1, -1):
        found[number] = found[number + 1] if number in lazy else number
    return found


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
    found: list[list[int]] = [[] for _ in program.calls]
    for storage, when in dropped.items():
        if uses[storage] and uses[storage][-1] >= when and makers[storage] >= 0:
            found[makers[storage]].append(storage)
    return found
