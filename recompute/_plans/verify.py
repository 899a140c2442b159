"""The verifier of plans: runs one step by step on the machine of the traces, and shares nothing with the planners."""

from __future__ import annotations

from collections import deque

from recompute._plans.schedule import PlanError, ProgramPlan
from recompute._simulator.tier import SimulatedTier
from recompute._traces.program import Call, Program, Step


def verify(program: Program, plan: ProgramPlan) -> tuple[int, float]:
    """The peak in bytes, sources included, and the overhead of a plan that does what the program does.

    The machine: a run needs every argument's value, and room for all its results that do not share memory with an
    argument, also for those still in memory (two copies exist while it runs). Freeing a storage drops all values on it.
    Each operation runs, first runs are in program order, and the outputs are there at the end.

    Between two first runs the program goes on as far as it can before the next step is done: it makes sources, which
    then take memory, and drops them, after which they can be freed; what it gets or detaches must be there, or
    else it waits for another step. A detached value then stays as a source does. O(steps).

    A fetch from the tier of the plan brings all results of an operation that has run, needs room for them as a run
    does, and costs a transfer; the first one of an operation costs two, since they were written, too.

    Raises PlanError, which names the step.
    """
    machine = _Machine(program, plan)
    for number, (kind, which) in enumerate(plan.steps):
        try:
            if kind == "compute":
                machine.compute(which)
            elif kind == "free":
                machine.free(which)
            elif kind == "fetch":
                machine.fetch(which)
            else:
                raise PlanError(f"{kind!r} is neither compute, free nor fetch")
        except PlanError as error:
            raise PlanError(f"step {number}, {kind} {which}: {error}") from None
    machine.finish()
    model = program.model_time
    return machine.peak, machine.cost / model if model else 1.0


class _Machine:
    """Memory, and what must still be run."""

    def __init__(self, program: Program, plan: ProgramPlan) -> None:
        self.program = program
        self.budget = plan.budget
        self.tier = SimulatedTier.read(plan.tier) if plan.tier else None
        self.written: set[int] = set()
        self.values: list[list[int]] = [[] for _ in program.sizes]  # storage -> values
        for value, storage in enumerate(program.storages):
            self.values[storage].append(value)
        self.cost = 0.0
        self.todo = [which for kind, which in program.steps if kind == "call"][::-1]
        self.ran: set[int] = set()
        self.gaps: dict[int, list[Step]] = {}  # call (-1: none) -> what the program does after it, before the next one
        last = -1
        for kind, which in program.steps:
            if kind == "call":
                last = which
            else:
                self.gaps.setdefault(last, []).append((kind, which))
        self.present: set[int] = set()
        self.resident: set[int] = set()
        self.kept: dict[int, int] = {}  # storage -> sources on it that the program has not dropped yet
        self.lasting: set[int] = set()  # these sources
        self.used = self.peak = 0
        self.gap = deque(self.gaps.get(-1, ()))  # what the program does now

    def compute(self, number: int) -> None:
        program = self.program
        if not 0 <= number < len(program.calls):
            raise PlanError("the program has no such operation")
        call = program.calls[number]
        first = number not in self.ran
        self._go_on()
        if first:
            self._first(number)
        for value in call.arguments:
            if value not in self.present:
                raise PlanError(f"the argument {value} of {call.name} is not present")
        self._make(call, {program.storages[value] for value in call.arguments})
        self.cost += call.cost
        if first:
            self.gap.extend(self.gaps.get(number, ()))

    def _make(self, call: Call, shared: set[int]) -> int:
        """All results are there; the bytes that this took, without those that are shared with arguments."""
        program = self.program
        made = {program.storages[value] for value in call.results} - shared
        size = sum(program.sizes[storage] for storage in made)
        self._within(size)
        for storage in made - self.resident:
            self.resident.add(storage)
            self.used += program.sizes[storage]
        self.present.update(call.results)
        return size

    def fetch(self, number: int) -> None:
        if self.tier is None:
            raise PlanError("the plan has no tier")
        if number not in self.ran:
            raise PlanError("an operation that has not run has no results to be fetched")
        size = self._make(self.program.calls[number], set())
        transfers = 1 if number in self.written else 2
        self.written.add(number)
        self.cost += transfers * self.tier.seconds(size) / self.program.unit

    def free(self, storage: int) -> None:
        detached = {value for kind, value in self.gap if kind == "detach"}
        mentions = [at for at, step in enumerate(self.gap) if self._mentions(step, storage, detached)]
        if mentions:
            kinds = [self.gap[at][0] for at in mentions]
            stays = kinds.count("source") + kinds.count("detach") > kinds.count("drop")
            if stays and "detach" in kinds:  # it is made again for that
                self._go_on(mentions[kinds.index("detach")])
            else:
                self._go_on(1 + mentions[-1])
        if self.kept.get(storage):
            raise PlanError("the storage of a source cannot be freed before the program drops it")
        if storage not in self.resident:
            raise PlanError("the storage is not in memory")
        self.resident.discard(storage)
        self.used -= self.program.sizes[storage]
        self.present.difference_update(self.values[storage])

    def finish(self) -> None:
        self._go_on()
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

    def _mentions(self, step: Step, storage: int, detached: set[int]) -> bool:
        kind, value = step
        if self.program.storages[value] != storage:
            return False
        return (
            kind in ("source", "get", "detach")
            or (kind == "drop" and self.program.makers[value] < 0)
            or value in self.lasting
            or value in detached
        )

    def _go_on(self, steps: int | None = None) -> None:
        """The program does so many of its steps between two calls, or as many as it can."""
        storages, gap = self.program.storages, self.gap
        done = 0
        while gap and (steps is None or done < steps):
            kind, value = gap[0]
            storage = storages[value]
            if kind in ("get", "detach") and value not in self.present:
                return
            if kind == "source":
                if storage not in self.resident:
                    self._within(self.program.sizes[storage])
                    self.used += self.program.sizes[storage]
                    self.resident.add(storage)
                self.present.add(value)
            if kind == "source" or (kind == "detach" and value not in self.lasting):
                self.lasting.add(value)
                self.kept[storage] = self.kept.get(storage, 0) + 1
            elif kind == "drop" and value in self.lasting:
                self.lasting.discard(value)
                self.kept[storage] -= 1
            gap.popleft()
            done += 1

    def _got(self, when: str) -> None:
        waiting = [value for kind, value in self.gap if kind in ("get", "detach")]
        if waiting:
            raise PlanError(f"{when} the value {waiting[0]} should have been there to be got, and was not")

    def _within(self, extra: int) -> None:
        self.peak = max(self.peak, self.used + extra)
        if self.used + extra > self.budget:
            over = self.used + extra - self.budget
            raise PlanError(f"the budget of {self.budget:,} bytes is exceeded by {over:,}")
