"""The planning problem of a program, as arrays: operations in order, with their arguments, results, bytes and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from recompute._plans.schedule import PlanError
from recompute._traces.program import Program, Step, total


def _go_on() -> None:
    """Nothing else is waiting."""


@dataclass(slots=True)
class Problem:
    """A program as arrays. An operation is a number: first the calls, then what costs nothing.

    That is: a `get` of the program takes a value and makes nothing; so does the place where the program drops
    sources, up to which they stay; the arrival of sources makes them, and cannot be repeated, and neither can `detach`,
    which makes a source of a value. The last operation, `final`, takes all outputs, and the sources that are left.

    Sources that are there from the first operation to the last are left out: `room` is what they leave of the budget.
    """

    calls: int
    """Operations below this number are calls of the program."""
    arguments: list[tuple[int, ...]] = field(default_factory=list)
    """Operation -> distinct values, without those of fixed storages that are no results."""
    results: list[tuple[int, ...]] = field(default_factory=list)
    makes: list[tuple[int, ...]] = field(default_factory=list)
    """Operation -> the storages that it allocates: those of its results that it does not share with an argument."""
    costs: list[float] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    """Operation -> bytes of the storages in `makes`."""
    storages: list[int] = field(default_factory=list)
    """Value -> storage."""
    makers: list[int] = field(default_factory=list)
    """Value -> operation; -1: a source that is always there."""
    sizes: list[int] = field(default_factory=list)
    """Storage -> bytes; zero for fixed ones."""
    fixed: bytearray = field(default_factory=bytearray)
    """Storage -> whether it belongs to a source that is always there, and is never freed."""
    once: bytearray = field(default_factory=bytearray)
    """Operation -> whether it cannot be repeated."""
    order: list[int] = field(default_factory=list)
    """All operations in program order, `final` last."""
    named: dict[Step, list[int]] = field(default_factory=dict)
    """A get or detach of the program -> the operations for it, in order."""
    constant: int = 0
    """Bytes of the fixed storages."""
    rest: Callable[[], None] = _go_on
    """Called every few hundred microseconds by planners: to let other threads have the interpreter, say."""
    room: int = 0
    """Bytes of the budget that these leave."""

    @property
    def final(self) -> int:
        """The use of all outputs at the end."""
        return len(self.arguments) - 1

    @property
    def lasting(self) -> set[int]:
        """The storages that come and go, and that nothing brings back. O(values)."""
        return {
            storage
            for storage, maker in zip(self.storages, self.makers, strict=True)
            if maker >= 0 and self.once[maker]
        }

    @property
    def model_cost(self) -> float:
        """The cost of each operation once."""
        return total(self.costs)

    @property
    def least(self) -> int:
        """Bytes, sources included, that some single operation needs: no plan does with less. O(arguments)."""
        sizes, storages = self.sizes, self.storages
        most = 0
        for operation, arguments in enumerate(self.arguments):
            held = sum([sizes[storage] for storage in {storages[value] for value in arguments}])
            most = max(most, held + self.needs[operation])
        return self.constant + most


def problem_of(program: Program, budget: int, *, lifetimes: bool = True) -> Problem:
    """The planning problem of a program under a budget in bytes. O(program).

    A source takes memory from where the program makes it to where it drops it, or to its last use, if that is
    later. Without `lifetimes` all sources are there from the first operation to the last; the operations have the same
    numbers.

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
    passing = _passing(program)
    for value, maker in enumerate(program.makers):
        storage = program.storages[value]
        if maker < 0 and not (lifetimes and value in passing) and not problem.fixed[storage]:
            problem.fixed[storage] = 1
            problem.constant += program.sizes[storage]
            problem.sizes[storage] = 0
    _Steps(program, problem, passing, lifetimes=lifetimes).take()
    problem.room = budget - problem.constant
    return problem


def _passing(program: Program) -> set[int]:
    """The sources that are not there from the first operation to the last."""
    passing: set[int] = set()
    begun = False
    for kind, which in program.steps:
        if kind == "call":
            begun = True
        elif (kind == "source" and begun) or (kind == "drop" and program.makers[which] < 0):
            passing.add(which)
    return passing


class _Steps:
    """Makes operations of the steps of a program."""

    def __init__(self, program: Program, problem: Problem, passing: set[int], *, lifetimes: bool) -> None:
        self._program = program
        self._problem = problem
        self._passing = passing
        self._lifetimes = lifetimes
        self._is = list(range(len(program.storages)))  # value of the program -> of the problem, now: see `detach`
        self._detached: set[int] = set()
        self._left: dict[int, None] = {}  # passing sources that are there

    def take(self) -> None:
        program, problem = self._program, self._problem
        for call in program.calls:
            self._add(call.arguments, call.results, call.cost)
        for kind, steps in groupby(program.steps, key=itemgetter(0)):
            values = [which for _, which in steps]
            if kind == "call":
                for number in values:
                    arguments = [self._is[value] for value in program.calls[number].arguments]
                    problem.arguments[number] = self._computed(arguments)
                problem.order += values
            elif kind == "source":
                if sources := [value for value in values if value in self._passing]:
                    self._pass((), sources)
                    self._left.update(dict.fromkeys(sources))
            elif kind == "drop":
                dropped = dict.fromkeys([self._is[value] for value in values])
                if sources := [value for value in dropped if value in self._left]:
                    self._pass(sources, ())  # up to here they stay
                    for value in sources:
                        del self._left[value]
            elif kind == "get":
                for value in values:
                    if program.makers[value] >= 0:
                        problem.order.append(self._named(("get", value), self._add((self._is[value],), (), 0.0)))
            elif kind == "detach":
                for value in values:
                    self._detach(value)
        outputs = [self._is[value] for value in program.outputs]
        problem.order.append(self._add([*outputs, *self._left], (), 0.0))

    def _detach(self, value: int) -> None:
        """Later users of the value take another one instead, which cannot be computed again."""
        if self._program.makers[value] < 0 or value in self._detached:
            return
        self._detached.add(value)
        detached = len(self._problem.storages)
        self._problem.storages.append(self._problem.storages[value])
        self._problem.makers.append(-1)
        self._named(("detach", value), self._pass((value,), (detached,)))
        if self._lifetimes:
            self._is[value] = detached
            self._left[detached] = None

    def _named(self, step: Step, number: int) -> int:
        self._problem.named.setdefault(step, []).append(number)
        return number

    def _pass(self, arguments: Sequence[int], results: Sequence[int]) -> int:
        """Sources come or go, or a value becomes one."""
        number = self._add(arguments, results, 0.0, once=bool(results))
        if self._lifetimes:
            for value in results:
                self._problem.makers[value] = number
            self._problem.order.append(number)
        return number

    def _computed(self, arguments: Sequence[int]) -> tuple[int, ...]:
        makers, passing = self._problem.makers, self._passing if self._lifetimes else ()
        return tuple([value for value in dict.fromkeys(arguments) if makers[value] >= 0 or value in passing])

    def _add(self, arguments: Sequence[int], results: Sequence[int], cost: float, *, once: bool = False) -> int:
        problem = self._problem
        held = {problem.storages[value] for value in arguments}
        makes = {problem.storages[value] for value in results} - held
        problem.arguments.append(self._computed(arguments))
        problem.results.append(tuple(results))
        problem.makes.append(tuple([storage for storage in sorted(makes) if not problem.fixed[storage]]))
        problem.costs.append(cost)
        problem.needs.append(sum([problem.sizes[storage] for storage in problem.makes[-1]]))
        problem.once.append(once)
        return len(problem.costs) - 1


def numbered(problem: Problem, steps: Iterable[Step]) -> list[int]:
    """The operations that these calls, gets and detaches of the program are; others are left out."""
    left = {step: iter(numbers) for step, numbers in problem.named.items()}
    operations: list[int] = []
    for kind, which in steps:
        if kind == "call":
            operations.append(which)
        else:
            number = next(left.get((kind, which), iter(())), None)
            if number is not None:
                operations.append(number)
    return operations


def woven(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """An order of runs with what it lacks of the problem's other operations put in: each after the one before it.

    The use of the outputs comes last: what they need may run again after all others have run.
    """
    has = set(sequence)
    following: dict[int, list[int]] = {}
    at = -1
    last: list[int] = []
    for operation in problem.order:
        if operation in has:
            at = operation
        elif operation == problem.final:
            last.append(operation)
        else:
            following.setdefault(at, []).append(operation)
    order = following.pop(-1, [])
    for operation in sequence:
        order.append(operation)
        order += following.pop(operation, ())
    return order + last


def check_least(problem: Problem) -> None:
    """Raises PlanError if some single operation does not fit."""
    budget = problem.constant + problem.room
    if budget < problem.least:
        raise PlanError(
            f"infeasible: the budget is {budget:,} bytes, but one operation with its arguments and the sources needs "
            f"{problem.least:,}; give at least that"
        )
