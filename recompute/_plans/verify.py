"""The judge of plans: runs one step by step on the machine of the traces, and shares nothing with the planners."""

from __future__ import annotations

from recompute._plans.schedule import Plan, PlanError
from recompute._traces.program import Program


def verify(program: Program, plan: Plan) -> tuple[int, float]:
    """The peak in bytes, sources included, and the overhead of a plan that does what the program does.

    The machine: sources stay in memory. A run needs every argument's value, and room for all its results that do not
    share memory with an argument, also for those still in memory (two copies exist while it runs). Freeing a storage
    drops all values on it. Each operation runs, first runs are in program order, what the program got (`get`) is there
    at some moment before the next first run, and the outputs are there at the end. O(steps).

    Raises PlanError, which names the step.
    """
    machine = _Machine(program, plan.budget)
    for number, (kind, which) in enumerate(plan.steps):
        try:
            if kind == "compute":
                machine.compute(which)
            elif kind == "free":
                machine.free(which)
            else:
                raise PlanError(f"{kind!r} is neither compute nor free")
        except PlanError as error:
            raise PlanError(f"step {number}, {kind} {which}: {error}") from None
    machine.finish()
    model = program.model_time
    return machine.peak, machine.cost / model if model else 1.0


class _Machine:
    """Memory, and what must still be run."""

    def __init__(self, program: Program, budget: int) -> None:
        self.program = program
        self.budget = budget
        self.present = {value for value, maker in enumerate(program.makers) if maker < 0}
        self.sources = {program.storages[value] for value in self.present}
        self.resident = set(self.sources)
        self.used = self.peak = sum(program.sizes[storage] for storage in self.sources)
        self.values: list[list[int]] = [[] for _ in program.sizes]  # storage -> values
        for value, storage in enumerate(program.storages):
            self.values[storage].append(value)
        self.cost = 0.0
        self.todo = [which for kind, which in program.steps if kind == "call"][::-1]
        self.ran: set[int] = set()
        self.gets: dict[int, set[int]] = {}  # call -> what is got after it, before the next one
        last = -1
        for kind, which in program.steps:
            if kind == "call":
                last = which
            elif kind == "get" and last >= 0:
                self.gets.setdefault(last, set()).add(which)
        self.pending: set[int] = set()
        self._within(0)

    def compute(self, number: int) -> None:
        program = self.program
        if not 0 <= number < len(program.calls):
            raise PlanError("the program has no such operation")
        call = program.calls[number]
        if number not in self.ran:
            self._first(number)
        for value in call.arguments:
            if value not in self.present:
                raise PlanError(f"the argument {value} of {call.name} is not present")
        shared = {program.storages[value] for value in call.arguments}
        made = {program.storages[value] for value in call.results} - shared
        self._within(sum(program.sizes[storage] for storage in made))
        for storage in made - self.resident:
            self.resident.add(storage)
            self.used += program.sizes[storage]
        self.present.update(call.results)
        self.cost += call.cost
        self.pending -= self.present

    def free(self, storage: int) -> None:
        if storage in self.sources:
            raise PlanError("the storage of a source cannot be freed")
        if storage not in self.resident:
            raise PlanError("the storage is not in memory")
        self.resident.discard(storage)
        self.used -= self.program.sizes[storage]
        self.present.difference_update(self.values[storage])

    def finish(self) -> None:
        if self.todo:
            raise PlanError(f"at the end operation {self.todo[-1]} has never run")
        self._got("at the end")
        for value in self.program.outputs:
            if value not in self.present:
                raise PlanError(f"at the end the output {value} is not present")

    def _first(self, number: int) -> None:
        if number != self.todo[-1]:
            raise PlanError(f"its first run comes before that of operation {self.todo[-1]}")
        self._got("before this step")
        self.todo.pop()
        self.ran.add(number)
        self.pending = set(self.gets.get(number, ()))

    def _got(self, when: str) -> None:
        if self.pending:
            raise PlanError(f"{when} the value {min(self.pending)} should have been there to be got, and was not")

    def _within(self, extra: int) -> None:
        self.peak = max(self.peak, self.used + extra)
        if self.used + extra > self.budget:
            over = self.used + extra - self.budget
            raise PlanError(f"the budget of {self.budget:,} bytes is exceeded by {over:,}")
