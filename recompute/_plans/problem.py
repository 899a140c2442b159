"""What a planner needs of a program: operations in order, what each needs, makes and costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from recompute._plans.schedule import PlanError
from recompute._traces.program import Program


@dataclass(slots=True)
class Problem:
    """A program as arrays. An operation is a number: first the calls, then the uses that cost nothing.

    Uses are operations without results: one for each `get` of the program, and a last one, `final`, that has all
    outputs as arguments. Sources are left out: they are always there, and `room` is what they leave of the budget.
    """

    calls: int
    """Operations below this number are calls of the program."""
    arguments: list[tuple[int, ...]] = field(default_factory=list)
    """Operation -> distinct values, without sources."""
    results: list[tuple[int, ...]] = field(default_factory=list)
    makes: list[tuple[int, ...]] = field(default_factory=list)
    """Operation -> the storages that it allocates: those of its results that it does not share with an argument."""
    costs: list[float] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    """Operation -> bytes of the storages in `makes`."""
    storages: list[int] = field(default_factory=list)
    """Value -> storage."""
    makers: list[int] = field(default_factory=list)
    """Value -> call; -1: a source."""
    sizes: list[int] = field(default_factory=list)
    """Storage -> bytes; zero for those of sources, which are never freed."""
    fixed: bytearray = field(default_factory=bytearray)
    """Storage -> whether it belongs to a source."""
    order: list[int] = field(default_factory=list)
    """All operations in program order, `final` last."""
    constant: int = 0
    """Bytes of the sources."""
    room: int = 0
    """Bytes of the budget that the sources leave."""

    @property
    def final(self) -> int:
        """The use of all outputs at the end."""
        return len(self.arguments) - 1

    @property
    def model_cost(self) -> float:
        """The cost of each operation once."""
        return sum(self.costs)

    @property
    def least(self) -> int:
        """Bytes, sources included, that some single operation needs: no plan does with less. O(arguments)."""
        sizes, storages = self.sizes, self.storages
        most = 0
        for operation, arguments in enumerate(self.arguments):
            held = sum([sizes[storage] for storage in {storages[value] for value in arguments}])
            most = max(most, held + self.needs[operation])
        return self.constant + most


def problem_of(program: Program, budget: int) -> Problem:
    """The planning problem of a program under a budget in bytes. O(program).

    Not planned for: pins and values held outside (a plan keeps what its operations need), and costs of repeated runs
    (each run costs what the first did). Raises ValueError if the program uses several devices.
    """
    used = {program.devices[storage] for storage in program.storages}
    if len(used) > 1:
        raise ValueError(
            f"a plan is for one device, but the program uses {', '.join(sorted(used))}; plan one at a time"
        )
    problem = Problem(len(program.calls), storages=list(program.storages), makers=list(program.makers))
    problem.sizes = list(program.sizes)
    problem.fixed = bytearray(len(program.sizes))
    for value, maker in enumerate(program.makers):
        storage = program.storages[value]
        if maker < 0 and not problem.fixed[storage]:
            problem.fixed[storage] = 1
            problem.constant += program.sizes[storage]
            problem.sizes[storage] = 0
    for call in program.calls:
        _add(problem, call.arguments, call.results, call.cost)
    for kind, which in program.steps:
        if kind == "call":
            problem.order.append(which)
        elif kind == "get" and program.makers[which] >= 0:
            problem.order.append(_add(problem, (which,), (), 0.0))
    problem.order.append(_add(problem, program.outputs, (), 0.0))
    problem.room = budget - problem.constant
    return problem


def check_least(problem: Problem) -> None:
    """Raises PlanError if some single operation does not fit."""
    budget = problem.constant + problem.room
    if budget < problem.least:
        raise PlanError(
            f"infeasible: the budget is {budget:,} bytes, but one operation with its arguments and the sources needs "
            f"{problem.least:,}; give at least that"
        )


def _add(problem: Problem, arguments: tuple[int, ...] | list[int], results: tuple[int, ...], cost: float) -> int:
    held = {problem.storages[value] for value in arguments}
    makes = {problem.storages[value] for value in results} - held
    computed = tuple([value for value in dict.fromkeys(arguments) if problem.makers[value] >= 0])
    problem.arguments.append(computed)
    problem.results.append(results)
    problem.makes.append(tuple([storage for storage in sorted(makes) if not problem.fixed[storage]]))
    problem.costs.append(cost)
    problem.needs.append(sum([problem.sizes[storage] for storage in problem.makes[-1]]))
    return len(problem.costs) - 1
