"""Planned functions: the same results as without a plan, within the budget; and a clear no to other graphs."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from lib.vectors import Buffer, Vector, vector
from recompute._staging.planned import Staged
from recompute.planners import Plan, PlanError, verify

Steps = list[tuple[str, list[int]]]


def added(*vectors: Vector) -> Vector:
    return vector(*[sum(vector.numbers[0] for vector in vectors) + len(vectors)] * 3)


def split(*vectors: Vector) -> tuple[Vector, Vector]:
    return vector(vectors[0].numbers[0]), vector(vectors[-1].numbers[0], 7)


def window(*vectors: Vector) -> Vector:
    return vectors[0].view(0, 1)


def run(steps: Steps, *inputs: Any) -> list[Any]:
    """Recomputables from inputs: each step takes some of the values so far."""
    values = list(inputs)
    for name, positions in steps:
        arguments = [values[position % len(values)] for position in positions]
        if name == "split":
            values += rc.ap(split, *arguments, nout=2)
        else:
            values.append(rc.ap({"added": added, "window": window}[name], *arguments))
    return values[-3:]


positions = st.lists(st.one_of(st.integers(-4, -1), st.integers(0, 9)), min_size=1, max_size=3)
programs = st.lists(
    st.tuples(st.sampled_from(("added", "added", "split", "window")), positions), min_size=3, max_size=20
)


def after_call(function: Staged[Any], *args: Any, **kwargs: Any) -> Staged[Any]:
    """A planned function that has been called once, so that it has a plan."""
    function(*args, **kwargs)
    return function


def staged(steps: Steps, inputs: list[Vector], share: float) -> Staged[Any]:
    """Within a share of the peak, or all of it if that is the least that can be done."""
    try:
        return after_call(rc.planned(run, of_peak=share, time_limit=0.1), steps, *inputs)
    except PlanError:
        return after_call(rc.planned(run, of_peak=1.0, time_limit=0.1), steps, *inputs)


@settings(max_examples=settings().max_examples // 4)
@given(programs, st.integers(1, 3), st.floats(0.4, 1.0))
def test_a_planned_function_returns_what_the_function_returns(steps: Steps, count: int, share: float) -> None:
    """For other inputs of the same shapes, too; and its plan passes the verifier."""
    function = staged(steps, [vector(number, 1) for number in range(count)], share)
    verify(function.program, function.plan)
    others = [vector(10 * number, 2) for number in range(count)]
    with rc.Cache():
        expected = [result.get() for result in run(steps, *map(rc.pure, others))]
    assert expected == function(steps, *others)


@settings(max_examples=settings().max_examples // 4)
@given(programs, st.floats(0.4, 1.0))
def test_what_is_alive_stays_within_the_budget(steps: Steps, share: float) -> None:
    """Counted by the buffers that exist whenever one is made, inputs included."""
    inputs = [vector(1, 1), vector(2, 2)]
    function = staged(steps, inputs, share)
    alive: list[int] = [0]
    most = [0]

    class Counted(Buffer):
        __slots__ = ()

        def __init__(self, numbers: tuple[int, ...], device: str = "cpu", slack: int = 0) -> None:
            super().__init__(numbers, device, slack)
            alive[0] += 8 * len(numbers)
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 8 * len(self.numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lib.vectors.Buffer", Counted)
        inputs = [vector(1, 1), vector(2, 2)]
        result = function(steps, *inputs)
    assert most[0] <= function.plan.budget
    del result


def double(values: Any) -> Any:
    return rc.ap(added, values)


def test_a_budget_in_bytes_holds_for_the_example_too() -> None:
    """The example is run within it, with recomputation if need be."""

    def chain(x: Any) -> Any:
        states = [x]
        for _ in range(12):
            states.append(rc.ap(added, states[-1]))
        while len(states) > 1:
            x = rc.ap(added, x, states.pop())
        return x

    function = after_call(rc.planned(chain, 8 * 3 * 8, time_limit=1.0), vector(1, 1, 1))
    assert function.plan.peak <= 8 * 3 * 8
    assert function.plan.overhead > 1
    with rc.Cache():
        assert function(vector(5, 1, 1)) == chain(rc.pure(vector(5, 1, 1))).get()


Pair = namedtuple("Pair", "left right")


def test_inputs_and_results_may_be_nested() -> None:
    """Lists, dicts, tuples and named tuples; arguments by name; constants, and inputs that are results."""

    def tangle(pair: Pair, *, more: dict[str, list[Any]], times: int) -> dict[str, Any]:
        constant = rc.pure(vector(100))
        total = rc.ap(added, pair.left, *more["all"], constant)
        for _ in range(times):
            total = rc.ap(lambda parts, by: added(*parts["p"], by), {"p": [total, pair.right]}, by=pair.left)
        return {"total": Pair(total, [total]), "same": pair.left, "plain": 7}

    def arguments(start: int) -> tuple[Any, Any]:
        return Pair(vector(start), vector(start + 1)), {"more": {"all": [vector(start + 2)]}, "times": 2}

    example, keywords = arguments(0)
    function = after_call(rc.planned(tangle, of_peak=1.0), example, **keywords)
    pair, keywords = arguments(5)
    result = function(pair, **keywords)
    with rc.Cache():
        wrapped = Pair(*map(rc.pure, pair))
        expected = tangle(wrapped, more={"all": [rc.pure(vector(7))]}, times=2)["total"][0].get()
    assert result == {"total": Pair(expected, [expected]), "same": vector(5), "plain": 7}


def test_recomputables_may_be_given() -> None:
    """As examples and later: their values are taken."""
    with rc.Cache():
        function = after_call(rc.planned(double, of_peak=1.0), rc.pure(vector(1)))
        assert function(rc.pure(vector(4))) == function(vector(4)) == added(vector(4))


def test_another_graph_is_refused() -> None:
    """Other shapes, structures, and plain arguments: one line that says which argument, and what to do."""

    def some(values: list[Any], times: int = 1) -> Any:
        return rc.ap(added, *values)

    function = after_call(rc.planned(some, of_peak=1.0), [vector(1), vector(2)], 3)
    for arguments, where in (
        (([vector(1), vector(2, 3)], 3), r"argument 0\[1\] differs"),
        (([vector(1)], 3), "argument 0 differs"),
        (((vector(1), vector(2)), 3), "argument 0 differs"),
        (([vector(1), vector(2)], 4), "argument 1 differs from the example: 4 instead of 3"),
        (([vector(1), vector(2)],), "the positional arguments differ"),
        (([vector(1), vector(2)], 3.0), "argument 1 differs"),
        (([1, 2], 3), r"argument 0\[0\] differs"),
    ):
        with pytest.raises(rc.StagingError, match=where) as caught:
            function(*arguments)
        assert "plan the function again" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_graph_that_depends_on_a_value_is_refused() -> None:
    """get, pin and detach while it is recorded; a function without Recomputables is no graph."""
    for peek in (lambda x: x.get(), lambda x: x.pin(), lambda x: x.detach()):
        with pytest.raises(rc.StagingError, match="cannot be planned"):
            rc.planned(lambda x, peek=peek: peek(rc.ap(added, x)), of_peak=1.0)(vector(1))
    with pytest.raises(rc.StagingError, match="cannot be planned"):
        rc.planned(lambda x: rc.ap(lambda: x.get()), of_peak=1.0)(vector(1))
    with pytest.raises(rc.StagingError, match="returned no Recomputable"):
        rc.planned(lambda x: 3, of_peak=1.0)(vector(1))


def test_results_of_another_size_are_refused() -> None:
    """The plan's memory would not hold: the operation is named."""
    sizes = [1]

    def fickle(x: Vector) -> Vector:
        return vector(*[0] * sizes[0])

    def pair(x: Vector) -> list[Vector]:
        return [x] * (1 + sizes[0])

    function = after_call(rc.planned(lambda x: rc.ap(fickle, x), of_peak=1.0), vector(1))
    assert function(vector(1)) == vector(0)
    both = after_call(rc.planned(lambda x: rc.ap(pair, x, nout=2), of_peak=1.0), vector(1))
    sizes[0] = 2
    with pytest.raises(rc.StagingError, match=r"fickle \(created at .*\) made 16 B instead of 8 B"):
        function(vector(1))
    with pytest.raises(rc.StagingError, match=r"pair .* returned 3 values instead of 2"):
        both(vector(1))


def test_the_plan_is_made_at_the_first_call() -> None:
    """Before, asking for it is an error that says so; a wrong budget is one when the function is planned."""
    assert rc.stage is rc.planned
    function = rc.planned(double, "1kB")
    assert "not called yet" in repr(function)
    for name in ("plan", "program"):
        with pytest.raises(rc.StagingError, match="at its first call"):
            getattr(function, name)
    assert function(vector(2)) == added(vector(2))
    assert isinstance(function.plan, Plan)
    assert function.plan.budget == 1000
    with pytest.raises(ValueError, match=r"of_peak=0\.4"):
        rc.planned(double, "40%")
    with pytest.raises(TypeError, match="either a budget"):
        rc.planned(double)


def test_it_runs_without_a_cache() -> None:
    """Nothing is recorded in the current cache, by planning or by running."""
    with rc.Cache() as cache:
        function = rc.planned(double, of_peak=1.0)
        function(vector(2))
        assert cache.stats().operations == 0
    assert "1 operations in 1 runs" in repr(function)
    assert function.__name__ == "double"


def test_what_a_function_raises_passes_through() -> None:
    """While it is recorded, after which the next call records it, and while the plan runs."""

    def divide(x: Vector) -> Vector:
        return vector(1 // x.numbers[0])

    function = rc.planned(lambda x: rc.ap(divide, x), of_peak=1.0)
    with pytest.raises(ZeroDivisionError):
        function(vector(0))
    assert function(vector(1)) == vector(1)
    with pytest.raises(ZeroDivisionError):
        function(vector(0))
    assert function(vector(1)) == vector(1)


def test_a_budget_that_nothing_meets_says_so() -> None:
    """PlanError for a share, BudgetError for bytes in which not even the example fits."""
    with pytest.raises(PlanError):
        rc.planned(double, of_peak=0.1)(vector(1))
    with pytest.raises(rc.BudgetError):
        rc.planned(double, 24)(vector(1, 2, 3))


def test_array_code_is_planned_with_wrapped_arrays() -> None:
    """They are wrapped in the function, too: operators, views, writes in place and library functions are recorded."""
    np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

    def change(a: Any, b: Any) -> Any:
        doubled = a * 2
        rest = doubled[1:]
        doubled += 1  # which `rest` sees
        chosen = np.where(rest > 3, rest, b[1:])
        chosen[0] = 7
        parts = [a * number for number in range(1, 9)]
        total = parts.pop()
        while parts:
            total = total + parts.pop()
        return {"rest": rest, "sum": np.sin(chosen).sum(), "total": total}

    planned = rc.planned(change, of_peak=0.7)
    for shift in (0.0, 1.0):
        a, b = np.arange(1000.0) + shift, np.ones(1000)
        made = planned(rc.array(a), rc.array(b))
        expected = change(a.copy(), b.copy())
        assert all(np.array_equal(made[name], value) for name, value in expected.items())
    assert planned.plan.overhead > 1


def test_plain_arguments_reach_the_operations() -> None:
    """Those that may change, too: as they were at the first call, whose like later calls must be."""

    class Scale:
        def __init__(self, by: int) -> None:
            self.by = by

    def scaled(x: Vector, plain: Any, scale: Any) -> Vector:
        return vector(x.numbers[0] * len(plain) * scale.by)

    scale = Scale(2)
    for plain in ({5, 6, 7}, bytearray(b"abc"), {"a": 1, "b": 2, "c": 3}):
        given = rc.planned(lambda x, plain, scale: rc.ap(scaled, x, plain, scale), of_peak=1.0)
        inside = rc.planned(lambda x, plain=plain: rc.ap(scaled, x, plain, scale=scale), of_peak=1.0)
        for _ in range(2):
            assert given(vector(7), plain, scale) == inside(vector(7)) == vector(42)
    numbers = {1, 2}
    function = after_call(rc.planned(lambda x, plain: rc.ap(scaled, x, plain, scale), of_peak=1.0), vector(1), numbers)
    numbers.add(3)
    with pytest.raises(rc.StagingError, match="argument 1 differs from the example: the same set, but it has changed"):
        function(vector(1), numbers)
    assert function(vector(1), {1, 2}) == vector(4)
    scale.by = 3
    with pytest.raises(rc.StagingError, match="the same Scale"):
        given(vector(1), {"a": 1, "b": 2, "c": 3}, scale)


def test_plain_numbers_are_told_apart_by_their_signs() -> None:
    """And what is not a number equals itself."""
    number: Any
    for number, other in ((0.0, -0.0), (float("nan"), 1.0), (0j, -0j)):
        function = rc.planned(lambda x, by: rc.ap(lambda x, by: repr(by), x, by), of_peak=1.0)
        assert function(vector(1), number) == function(vector(1), type(number)(number)) == repr(number)
        with pytest.raises(rc.StagingError, match="argument 1 differs"):
            function(vector(1), other)


def test_containers_of_arguments_are_planned() -> None:
    """They are counted whole: what is in them stays with them where the plan frees it."""
    np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

    def program(x: Any) -> Any:
        parts = [rc.ap(np.add, x, number) for number in range(3)]
        return rc.sequence(parts)

    function = rc.planned(program, of_peak=1.0)
    for shift in (0, 5):
        x = np.arange(1000.0) + shift
        assert all(np.array_equal(made, x + number) for number, made in enumerate(function(x)))
    assert function.plan.peak >= 7 * 8000


def test_random_numbers_from_outside_cannot_be_planned() -> None:
    """Each call would have to draw others, and a repeated run the same: the operation is named, and the cure."""
    generator = random.Random(1)

    def drawn(x: Vector) -> Vector:
        return vector(x.numbers[0] + generator.randrange(1000))

    function = rc.planned(lambda x: rc.ap(drawn, x), of_peak=1.0)
    with pytest.raises(rc.StagingError, match=r"drawn \(created at .*\) draws random numbers.*pass it a seed"):
        function(vector(1))
    seeded = rc.planned(lambda x: rc.ap(lambda x: vector(random.Random(7).randrange(9)), x), of_peak=1.0)
    assert seeded(vector(1)) == seeded(vector(1))


def test_a_decorator() -> None:
    """Without a function, what is returned takes one."""

    @rc.planned(budget="1kB", time_limit=0.1)
    def doubled(x: Any) -> Any:
        """Twice."""
        return double(x)

    assert (doubled(vector(2)), doubled.__doc__) == (added(vector(2)), "Twice.")
    assert doubled.plan.budget == 1000


def test_a_method() -> None:
    """A planned function in a class takes the object first; another object is another argument."""

    class Twice:
        @rc.planned(budget="1kB", time_limit=0.1)
        def of(self, x: Any) -> Any:
            return double(x)

    twice = Twice()
    assert twice.of(vector(2)) == twice.of(vector(2)) == added(vector(2))
    assert twice.of.plan.budget == Twice.of.plan.budget == 1000
    with pytest.raises(rc.StagingError, match="argument 0"):
        Twice().of(vector(2))


def test_what_cannot_be_planned_says_so() -> None:
    """No function, a result of another cache, and arguments without an end."""
    with pytest.raises(
        TypeError, match=r"planned takes a function first, not '1MB'; as a decorator: @planned\(budget='1MB'"
    ):
        rc.planned("1MB", of_peak=1.0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="give either"):
        rc.planned(method="own")  # where the decorator is written, not at the first call
    other = rc.Cache()

    def elsewhere(x: Any) -> Any:
        with other:
            return rc.ap(vector, 1)

    with pytest.raises(rc.StagingError, match="elsewhere returned a Recomputable of another cache"):
        rc.planned(elsewhere, of_peak=1.0)(vector(1))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        rc.planned(double, of_peak=1.0)(endless)


def test_dicts_keep_their_order() -> None:
    """That of the first call; later ones may have another."""

    def parts(given: dict[str, Any]) -> Any:
        return list(given), [rc.ap(added, value) for value in given.values()]

    function = rc.planned(parts, of_peak=1.0)
    one, two = vector(1, 1, 1), vector(5, 5, 5)
    assert function({"b": one, "a": two}) == (["b", "a"], [added(one), added(two)])
    assert function({"a": two, "b": one}) == (["b", "a"], [added(one), added(two)])
