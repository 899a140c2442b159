"""The surface: what is exported, what importing costs, how values print and travel, and what costs and events mean."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
import warnings
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import recompute as rc
import recompute.testing
from recompute._engine.events import Accessed, Added, Evicted, Forgotten, LetGo, Performed, Released, TakenBack
from recompute.testing import EventLog, Identity, ManualClock, check_invariants
from recompute.testing._vectors import vector

HOUSE = Path(rc.__file__).parent


def unit(*arguments: Any, **more: Any) -> int:
    return 1


def test_what_is_exported() -> None:
    """The public names, and that each is there."""
    assert rc.__all__ == sorted(rc.__all__)
    assert {
        "Adapter",
        "ArrayAdapter",
        "BudgetError",
        "Cache",
        "ImpureError",
        "Outline",
        "Recomputable",
        "RecomputableArray",
        "StagingError",
        "Stats",
        "ap",
        "array",
        "asarray",
        "available",
        "current_cache",
        "default_cache",
        "lift",
        "namespace",
        "pure",
        "register",
        "register_size",
        "sequence",
        "set_default_cache",
        "sizeof",
        "stage",
        "traverse",
        "wrap",
    } == set(rc.__all__)
    for name in rc.__all__:
        assert getattr(rc, name) is not None
    assert recompute.testing.__all__ == [
        "EventLog",
        "Identity",
        "ManualClock",
        "check_adapter",
        "check_arrays",
        "check_invariants",
    ]


def test_the_identity_has_the_same_surface() -> None:
    """Each function of the module and each method of a Recomputable is an attribute of Identity."""
    for name in ("pure", "ap", "lift", "sequence", "traverse"):
        assert callable(getattr(Identity, name))
    for name in dir(rc.Recomputable):
        if not name.startswith("_") and name not in ("number", "cache", "engine", "node"):
            assert hasattr(Identity, name), name


@pytest.mark.parametrize("module", ["recompute", "recompute.testing"])
def test_importing_loads_no_framework(module: str) -> None:
    """Neither a framework nor what is slow to import comes along."""
    unwanted = (
        "numpy", "torch", "jax", "cupy", "pandas", "pyarrow", "hypothesis", "pytest", "psutil", "matplotlib", "rich",
        "importlib.metadata",
    )  # fmt: skip
    code = f"import sys, {module}; print([name for name in {unwanted!r} if name in sys.modules])"
    path = [str(HOUSE.parent), *filter(None, sys.path)]
    told = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path[:1]!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "[]", told.stdout


LAYERS = [
    ["_errors", "_graph", "_python", "_stats"],
    ["_adapter", "_array_adapter", "_events", "_policy", "_tournament"],
    ["_arguments", "_budget", "_neighbours", "_verify"],
    ["_needs"],
    ["_search", "_sizes"],
    ["_flight", "_pool", "_context"],
    ["_repair"],
    ["_lifetimes"],
    ["_results"],
    ["_turns"],
    ["_allocation"],
    ["_runs"],
    ["_engine"],
    ["_at_once"],
    ["_cache"],
    ["_recomputable"],
    [
        "_arrays._call",
        "_arrays._operate",
        "_arrays._dispatch",
        "_arrays._parts",
        "_arrays._attributes",
        "_arrays._coercions",
        "_arrays._array",
        "_arrays._wrap",
        "_arrays._namespace",
    ],
]
"""From below; a module imports only what stands on a lower line, or earlier on its own."""


def file_of(module: str) -> Path:
    return HOUSE / f"{module.replace('.', '/')}.py"


def imports(path: Path) -> set[str]:
    """The modules of the house that one imports when it is imported: not inside functions, not for types alone."""
    found: set[str] = set()
    stack: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "recompute":
            rest = (node.module or "").removeprefix("recompute").removeprefix(".")
            found.update([rest] if rest else [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            found.update(each.name[10:] for each in node.names if each.name.startswith("recompute."))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
    return found


def test_imports_run_downwards() -> None:
    """No module of the core imports one above it."""
    order = [name for layer in LAYERS for name in layer]
    for position, name in enumerate(order):
        above = imports(file_of(name)) & set(order[position:])
        assert not above, f"{name} imports {above}, which stand above it"


def test_the_core_knows_nobody_above() -> None:
    """The engine imports neither testing nor commands, and every module says its one idea in its first line."""
    order = [name for layer in LAYERS for name in layer]
    for name in order:
        for other in imports(file_of(name)):
            assert other in order, f"{name} imports {other}"
    for path in HOUSE.rglob("*.py"):
        first = ast.get_docstring(ast.parse(path.read_text()))
        assert first, f"{path.name} has no docstring"
        assert len(first.splitlines()[0]) > 15, f"{path.name} does not say what it is"


def test_reprs() -> None:
    """What prints tells what it is, how large, and in what state."""
    with rc.Cache("1 MB") as cache:
        x = rc.pure(vector(1, 2))
        y = rc.ap(vector, 3, nbytes=2000)
        assert repr(x) == "<Recomputable source: resident, 16 B>"
        assert repr(y) == "<Recomputable vector: resident, 2 kB>"
        assert repr(y.pin()).endswith("pinned, 2 kB>")
        y.unpin().evict()
        assert "evicted" in repr(y)
        assert repr(cache) == "<Cache needed: 16 B used of 1 MB, 1 evictions>"
        assert "unlimited" in repr(rc.Cache())
        assert "gpu:0" in repr(rc.Cache({"gpu:0": "1 GB"}))
        assert "lambda" in repr(rc.ap(lambda: 1))
        assert "vector" in repr(rc.ap(partial(partial(vector, 1), 2)))
        assert "test_reprs" in repr(rc.ap(lambda: 1).node.operation)


def test_a_copy_and_a_pickle_are_sources() -> None:
    """The value travels, its history does not; copies of containers work, too."""
    with rc.Cache():
        y = rc.ap(list, (1, 2))
        y.evict()
        for other in (copy.copy(y), copy.deepcopy(y), pickle.loads(pickle.dumps(y))):
            assert other is not y
            assert other.get() == [1, 2]
            assert "source" in repr(other)
            assert not other.evict()
        assert copy.deepcopy({"a": [y]})["a"][0].get() == [1, 2]


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize("surface", [rc, Identity])
def test_values_inside_containers_are_dependencies(surface: Any) -> None:
    """Tuples, named tuples, lists and dicts, nested, among positional and keyword arguments."""

    def look(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    one, two = surface.ap(int, "1"), surface.ap(int, "2")
    y = surface.ap(look, one, (two, "a"), [one, [two]], {"k": (one,), 3: None}, Point(one, 7), p=one, q=[two])
    for each in (y, one, two):
        each.evict()
    args, kwargs = y.get()
    assert args == (1, (2, "a"), [1, [2]], {"k": (1,), 3: None}, Point(1, 7))
    assert type(args[4]) is Point
    assert kwargs == {"p": 1, "q": [2]}


@pytest.mark.parametrize("surface", [rc, Identity])
def test_containers_are_copied_when_the_operation_is_made(surface: Any) -> None:
    """What the caller, or the function, does to a list afterwards changes no later run."""

    def consume(items: list[int]) -> int:
        total = 0
        while items:
            total += items.pop()
        return total

    items = [surface.pure(1), 2, 3]
    y = surface.ap(consume, items)
    items.clear()
    y.evict()
    assert y.get() == 6
    y.evict()
    assert y.get() == 6


@pytest.mark.parametrize("surface", [rc, Identity])
def test_a_list_that_contains_itself(surface: Any) -> None:
    """It has no end, and is refused by name."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        surface.ap(unit, endless)


@pytest.mark.parametrize("surface", [rc, Identity])
def test_lift_in_all_its_forms(surface: Any) -> None:
    """A wrapper, a decorator, a decorator with arguments; names and documentation stay."""

    @surface.lift  # type: ignore[untyped-decorator]  # a surface is Any
    def add(a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @surface.lift(nout=2)  # type: ignore[untyped-decorator]  # it gives Any
    def split(a: int) -> tuple[int, int]:
        return a // 10, a % 10

    assert add.__name__ == "add"
    assert add.__doc__ == "The sum."
    assert add(1).get() == 2
    assert add(surface.pure(2), b=surface.pure(3)).get() == 5
    assert [each.get() for each in split(surface.pure(42))] == [4, 2]
    assert surface.lift(max)(surface.pure(1), 5).get() == 5


@pytest.mark.parametrize("surface", [rc, Identity])
def test_a_function_that_is_a_value(surface: Any) -> None:
    """ap of a Recomputable, and its method apply, call what it holds."""
    f = surface.pure(lambda a, b=0: a + b)
    assert surface.ap(f, surface.pure(1), b=2).get() == 3
    assert f.apply(1, b=surface.pure(2)).get() == 3
    assert [each.get() for each in surface.pure(divmod).apply(7, 3, nout=2)] == [2, 1]


@pytest.mark.parametrize("surface", [rc, Identity])
@pytest.mark.parametrize("value", [None, False, 0, "", (), [], ValueError("kept"), object, 10**400, b"x" * 10**6])
def test_any_object_is_a_value(surface: Any, value: Any) -> None:
    """None, exceptions, classes, nothing and much: as sources, as results, evicted or not."""
    assert surface.pure(value).get() is value
    y = surface.ap(lambda: value)
    y.evict()
    assert y.get() is value
    assert surface.ap(lambda each: each is value, y).get() is True


def test_values_of_two_caches_do_not_mix() -> None:
    """An operation belongs to one cache; the error says how to pass a value over."""
    one, two = rc.Cache(), rc.Cache()
    with one:
        x = rc.pure(1)
    with two:
        y = rc.pure(2)
        with pytest.raises(ValueError, match="two caches"):
            rc.ap(max, x, y)
        assert rc.ap(max, x.get(), y).get() == 2


def test_the_current_cache() -> None:
    """The innermost `with`, or the default one, which can be replaced; arguments say more than either."""
    outer, inner = rc.Cache(), rc.Cache()
    before = rc.current_cache()
    with outer:
        x = rc.pure(1)
        with inner:
            assert rc.current_cache() is inner
            y = rc.ap(unit, x)
        assert rc.current_cache() is outer
    assert rc.current_cache() is before is rc.default_cache()
    assert outer.stats().operations == 1
    assert y.get() == 1
    mine = rc.Cache()
    rc.set_default_cache(mine)
    try:
        assert rc.current_cache() is mine
    finally:
        rc.set_default_cache(before)


class Work:
    """Operations that take time on a manual clock."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.cache = rc.Cache(clock=self.clock, **options)

    def __call__(self, seconds: float, *payloads: Any) -> int:
        self.clock.advance(seconds)
        return len(payloads)


def test_costs_exclude_nested_rematerialization() -> None:
    """A function that gets an evicted value is not billed for bringing it back."""
    work = Work()
    with work.cache, EventLog(work.cache) as log:
        x = rc.ap(work, 10.0)
        x.evict()

        def outer() -> int:
            work(1.0)
            x.get()
            work(2.0)
            return 1

        y = rc.ap(outer)
        costs = [(event.cost, event.again) for event in log.performed()]
    assert costs == [(10.0, False), (10.0, True), (3.0, False)]
    stats = work.cache.stats()
    assert (stats.model_time, stats.remat_time) == (13.0, 10.0)
    assert stats.overhead == pytest.approx(23 / 13)
    assert work.cache.engine.meter.now == 23.0
    assert y.get() == 1


def test_costs_exclude_operations_made_inside() -> None:
    """Nor for operations that the function makes."""
    work = Work()
    with work.cache, EventLog(work.cache) as log:

        def outer() -> Any:
            work(1.0)
            return rc.ap(work, 5.0).get()

        rc.ap(outer)
        assert [event.cost for event in log.performed()] == [5.0, 1.0]


def test_a_cheaper_second_run_is_the_cost() -> None:
    """The first run of a compiled function is not its cost; a dearer one changes nothing."""
    work = Work()
    times = iter([9.0, 2.0, 5.0])
    with work.cache:
        y = rc.ap(lambda: work(next(times)))
        costs = [y.node.operation.c0]
        for _ in range(2):
            y.evict()
            y.get()
            costs.append(y.node.operation.c0)
        check_invariants(work.cache, [y])
    assert costs == [9.0, 2.0, 2.0]
    assert work.cache.stats().recomputed[0].times == 2
    assert work.cache.stats().recomputed[0].seconds == 7.0


def test_sizes_are_learnt_by_function_and_shapes() -> None:
    """Room is made before the second run of a function on such arguments: the budget holds from then on."""

    def double(payload: Any) -> Any:
        return vector(*(2 * number for number in payload.numbers))

    cache = rc.Cache(100)
    with cache:
        x = rc.pure(vector(1, 2, 3))
        kept = [rc.ap(double, x) for _ in range(20)]
        assert cache.stats().peak <= 100
        assert cache.stats().overshoot == 0
        short = rc.pure(vector(1))
        kept += [rc.ap(double, short) for _ in range(20)]
        assert cache.stats().peak <= 100
        check_invariants(cache, [x, short, *kept])


def test_declared_sizes_are_believed() -> None:
    """nbytes counts, whatever the adapter would say: one for all outputs, or one each."""
    cache = rc.Cache(100)
    with cache:
        y = rc.ap(vector, 1, nbytes=60)
        assert cache.stats().used == 60
        a, b = rc.ap(lambda: (1, 2), nout=2, nbytes=[10, 20])
        assert cache.stats().used == 90
        c, d = rc.ap(lambda: (1, 2), nout=2, nbytes=5)
        assert cache.stats().used == 100
        assert cache.stats().peak <= 100
        kept = [y, a, b, c, d]
        assert all(each.resident for each in kept)
        check_invariants(cache, kept)


def test_a_get_inside_an_operation_is_a_dependency() -> None:
    """Found at run time, remembered: it stays alive for the operation, and its eviction is a neighbour's."""
    cache = rc.Cache()
    with cache, EventLog(cache) as log:
        x = rc.ap(vector, 1, 2)
        box = [x]
        y = rc.ap(lambda: vector(len(box[0].get())))
        assert log.performed()[-1].arguments == (x.number,)
        x.evict()
        y.evict()
        log.clear()
        assert y.get() == vector(2)
        assert log.names() == ["vector", log.names()[-1]]
        check_invariants(cache, [x, y])


def test_events_tell_what_happened() -> None:
    """A source, a run, an eviction, a rerun, a value taken back, a value forgotten: each with time and bytes."""
    clock = ManualClock()
    cache = rc.Cache(clock=clock)

    def slow(payload: Any) -> Any:
        clock.advance(2.0)
        return vector(*payload.numbers)

    with cache, EventLog(cache) as log:
        x = rc.pure(vector(1, 2))
        y = rc.ap(slow, x)
        y.evict()
        held = y.get()
        y.evict()
        assert y.get() is held
        number = y.number
        del y, held
    ran = (number,), (16,), (x.number,), (number,), (number,), (x.number,), "cpu", None
    slow_name = "test_events_tell_what_happened.slow"
    assert log.events == [
        Added(0.0, 16, x.number, 16, "cpu"),
        Performed(2.0, 32, slow_name, 2.0, False, *ran),
        Evicted(2.0, 16, number, 16, "request"),
        Performed(4.0, 32, slow_name, 2.0, True, *ran),
        Accessed(4.0, 32, number),
        Evicted(4.0, 32, number, 16, "request", True, (number,)),
        TakenBack(4.0, 32, number, 16),
        Accessed(4.0, 32, number),
        Released(4.0, 32, number),
        Forgotten(4.0, 32, number),
        LetGo(4.0, 16, number),
    ]
    del x
    assert len(log) == 11


def test_a_listener_that_raises_is_dropped() -> None:
    """With a warning; the run and the other listeners go on."""
    cache = rc.Cache()

    def bad(event: Any) -> None:
        raise RuntimeError("no")

    cache.subscribe(bad)
    with cache, EventLog(cache) as log:
        with pytest.warns(RuntimeWarning, match="will hear no more"):
            x = rc.pure(1)
        y = rc.ap(unit, x)
        assert len(log) == 2
        assert y.get() == 1


def test_a_listener_that_leaves_and_raises() -> None:
    """It has gone already: only the warning remains."""
    cache = rc.Cache()

    def leaving(event: Any) -> None:
        stop()
        raise RuntimeError("no")

    stop = cache.subscribe(leaving)
    with cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rc.pure(1).get() == 1
    stop()


def test_a_listener_may_use_the_cache() -> None:
    """Events come after the lock is released."""
    cache = rc.Cache()
    seen: list[Any] = []

    def curious(event: Any) -> None:
        seen.append(type(event).__name__)
        assert cache.stats().used in (0, 16)

    cache.subscribe(curious)
    with cache:
        y = rc.ap(vector, 1, 2)
        y.evict()
        assert y.get() == vector(1, 2)
    assert seen == ["Performed", "Evicted", "Performed", "Accessed"]


def test_statistics_are_a_snapshot() -> None:
    """They compare, and do not change."""
    with rc.Cache() as cache:
        before = cache.stats()
        assert before == cache.stats()
        y = rc.ap(vector, 1, 2)
        assert before.used == 0
        after = cache.stats()
        assert (after.used, after.peak, after.operations, after.overhead) == (16, 16, 1, 1.0)
        y.evict()
        y.get()
        assert cache.stats().recomputed[0].function == "vector"
        assert cache.stats().rematerializations == 1


def test_wrong_choices_are_named() -> None:
    """A release mode or a clock that is none."""
    with pytest.raises(ValueError, match="choose from ignore, eager, banish"):
        rc.Cache(release="lazy")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="clock"):
        rc.Cache(clock=3.0)  # type: ignore[arg-type]  # on purpose


def test_pins_and_evictions_say_what_they_did() -> None:
    """evict is True only if something was dropped; pin brings a value back and keeps it."""
    with rc.Cache() as cache:
        x, y = rc.pure(vector(1)), rc.ap(vector, 2)
        assert not x.evict()
        assert y.evict()
        assert not y.evict()
        assert y.pin() is y
        assert y.resident
        assert y.pinned
        assert not y.evict()
        assert y.pin().pinned
        assert y.unpin() is y
        assert not y.pinned
        assert y.evict()
        assert y.unpin().pinned is False
        check_invariants(cache, [x, y])


def test_a_manual_clock_runs_only_forwards() -> None:
    """Time stands still, or is told to pass."""
    clock = ManualClock(1.0)
    assert (clock(), clock()) == (1.0, 1.0)
    clock.advance(2.5)
    assert clock() == 3.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
    assert repr(clock) == "ManualClock(3.5)"
