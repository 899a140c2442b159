"""Dask's threaded scheduler within a budget: the results of the plain one, writable, in less memory."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
dask = pytest.importorskip("dask", reason="the extra 'dask' is not installed")
da = pytest.importorskip("dask.array", reason="the extra 'dask' is not installed")

from dask._task_spec import DataNode, List, Task, TaskRef  # noqa: E402  # after importorskip
from dask.callbacks import Callback  # noqa: E402
from dask_graphs import (  # noqa: E402
    ARRAY,
    LENGTH,
    add,
    add_in_place,
    check_equal,
    graphs,
    grow,
    make,
    misses_of_lru,
    model,
    pair,
    same,
    thing,
)

import recompute_dask as rd  # noqa: E402
from recompute_dask import _installed, _payloads, _recipe  # noqa: E402


@settings(max_examples=60)
@given(graphs(), st.integers(10, 40), st.integers(1, 3), st.booleans())
def test_a_graph_has_the_results_of_the_model(graph: Any, arrays: int, threads: int, disk: bool) -> None:
    """Whatever the budget and the number of threads; data of the graph stays as it is."""
    tasks, keys = graph
    wanted = model(tasks, keys, {})
    found = rd.get(tasks, keys, budget=arrays * ARRAY, tiers=rc.Disk() if disk else (), num_workers=threads)
    check_equal(wanted, found)
    (data,) = [task.value for task in tasks.values() if isinstance(task, DataNode)]
    np.testing.assert_array_equal(data, make(7))
    assert data.flags.writeable
    stats = rd.stats()
    assert stats.peak <= arrays * ARRAY + stats.overshoot


@pytest.mark.parametrize("kind", ["argument", "literal", "fused"])
def test_what_tasks_change_they_change_for_themselves(kind: str) -> None:
    """Arguments of a type that nobody knows, parts of containers and literals are as they were when tasks run again."""
    graph: dict[Any, Any] = {
        "x": Task("x", make, 1),
        "thing": Task("thing", thing, TaskRef("x")),
        "two": Task("two", pair, TaskRef("x"), TaskRef("x")),
    }
    literal = [make(5)] if kind == "literal" else []
    for number in range(12):
        task = Task(("y", number), grow, TaskRef("thing"), TaskRef("two"), literal)
        inner = Task(("z", number), add_in_place, make(number), TaskRef("x"))
        last = Task(("y", number), add_in_place, TaskRef(inner.key), make(number))
        graph["y", number] = Task.fuse(inner, last, key=task.key) if kind == "fused" else task
    for number in range(0, 12, 3):
        some = [TaskRef(("y", index % 12)) for index in range(number, number + 6)]
        graph["sum", number] = Task(("sum", number), lambda *numbers: sum(numbers), *some)
    keys = [("sum", 0), ("sum", 3), ("sum", 6), ("sum", 9), "x"]
    wanted = model(graph, keys, {})
    found = rd.get(graph, keys, budget=(11 if kind == "fused" else 15) * ARRAY, num_workers=1)
    check_equal(wanted, found)
    assert rd.stats().rematerializations > 0


def test_arrays_inside_of_objects_that_are_values_too_are_counted_once() -> None:
    """Objects made of arrays hold these: two of them fit beside what their tasks take, whatever the tasks cost."""
    graph: dict[Any, Any] = {}
    for name in ("x", "y"):
        graph[name] = Task(name, make, 3)
        graph[f"thing-{name}"] = Task(f"thing-{name}", thing, TaskRef(name))
        graph[f"two-{name}"] = Task(f"two-{name}", pair, TaskRef(name), TaskRef(name))
        graph[f"grown-{name}"] = Task(f"grown-{name}", grow, TaskRef(f"thing-{name}"), TaskRef(f"two-{name}"), [])
    keys = ["grown-x", "grown-y"]
    wanted = model(graph, keys, {})
    for _ in range(20):
        check_equal(wanted, rd.get(graph, keys, budget=int(8.5 * ARRAY), num_workers=1))


@pytest.mark.parametrize("name", ["anomalies", "svd", "covariance", "rechunked"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_array_programs_have_the_results_of_plain_threads(name: str, share: float) -> None:
    """To the last bit, within a share of the memory that they take without a budget."""
    x = da.random.default_rng(1).random((2000, 100), chunks=(50, 50))
    centred = x - x.mean(axis=0)
    program = {
        "anomalies": lambda: (centred / x.std(axis=0)).sum(axis=1).max(),
        "svd": lambda: da.linalg.svd(x[:, :20].rechunk((50, 20)))[0].std(axis=0),
        "covariance": lambda: (centred.T @ centred).sum(axis=0),
        "rechunked": lambda: (x.rechunk((100, 50)) + 1).T.cumsum(axis=1).max(axis=1),
    }[name]()
    wanted = program.compute(scheduler="threads", num_workers=2)
    program.compute(scheduler=rd.get, num_workers=2)
    budget = max(int(share * rd.stats().peak), 4 * 40_000)  # four chunks
    found = program.compute(scheduler=rd.get, num_workers=2, budget=budget)
    np.testing.assert_array_equal(wanted, found)
    assert rd.stats().peak <= budget + rd.stats().overshoot


def test_a_frame_that_a_task_writes_into_stays_as_it_is() -> None:
    """New columns of a frame, elements of a list of a bag: other tasks do not see them."""
    pd = pytest.importorskip("pandas", reason="the extra 'pandas' is not installed")
    graph = {
        "frame": Task("frame", lambda: pd.DataFrame({"a": np.arange(LENGTH)})),
        "more": Task("more", lambda frame: frame.__setitem__("b", 1) or len(frame.columns), TaskRef("frame")),
        "again": Task("again", lambda frame, _: len(frame.columns), TaskRef("frame"), TaskRef("more")),
        "list": Task("list", lambda: list(range(LENGTH))),
        "shorter": Task("shorter", lambda numbers: numbers.clear(), TaskRef("list")),
        "length": Task("length", lambda numbers, _: len(numbers), TaskRef("list"), TaskRef("shorter")),
    }
    assert rd.get(graph, ["more", "again", "length"]) == (2, 1, LENGTH)


def test_a_block_is_entered_again() -> None:
    """With its budget, and the tiers of the configuration unless it has its own; wrong ones are refused at once."""
    total = da.ones((100, 100), chunks=50).sum()
    block = rd.budget("1MB")
    with block:
        assert total.compute() == 10_000
    block.budget = "2MB"
    assert dask.config.get("recompute.budget", None) is None
    with dask.config.set({"recompute.tiers": "1GB"}):
        with block:
            assert total.compute() == 10_000
        assert block.stats().budget == 2_000_000
        assert block.stats().tiers[0].limit == 1_000_000_000
        with rd.budget("1MB", tiers=()) as without:
            total.compute()
        assert not without.stats().tiers
    assert dask.config.get("scheduler", None) is None
    with pytest.raises(ValueError, match="much"):
        rd.budget("1MB", tiers="much")
    assert dask.config.get("scheduler", None) is None


def test_a_budget_is_a_block_or_for_good() -> None:
    """`rd.budget` sets Dask's scheduler and configuration, and gives back what there was."""
    x = da.ones((100, 100), chunks=50)
    with rd.budget("1MB") as block:
        with pytest.raises(RuntimeError, match="nothing was computed"):
            block.stats()
        assert x.sum().compute() == 10_000
        assert block.stats() is rd.stats()
        assert rd.stats().pools[0].budget == 1_000_000
        assert dask.config.get("scheduler") is rd.get
        block.budget = "3MB"
        assert x.sum().compute() == 10_000
        assert rd.stats().pools[0].budget == 3_000_000
    assert dask.config.get("scheduler", None) is dask.config.get("recompute.budget", None) is None
    with dask.config.set({"scheduler": rd.get, "recompute.budget": "2MB", "recompute.tiers": "1GB"}):
        assert x.sum().compute() == 10_000
        assert rd.stats().pools[0].budget == 2_000_000
        assert rd.stats().tiers[0].limit == 1_000_000_000
    assert block.stats() is not rd.stats()
    with pytest.raises(ValueError, match="2 monkeys"):
        rd.budget("2 monkeys")


def test_what_cannot_fit_is_an_error_that_names_the_task_and_the_cure() -> None:
    """A task that takes more than the whole budget at once."""
    x = da.random.default_rng(1).random((400, 400), chunks=(400, 20))
    rows = x.rechunk((20, 400))
    whole = Task("whole", lambda parts: np.concatenate(parts), List(*[TaskRef(("x", n)) for n in range(9)]))
    graph = {**{("x", n): Task(("x", n), make, n) for n in range(9)}, "whole": whole}
    with pytest.raises(rc.BudgetError, match=r"the task 'whole', which takes 9 results .*make chunks smaller"):
        rd.get(graph, "whole", budget=6 * ARRAY)
    assert rows.sum().compute(scheduler=rd.get, budget="2MB") > 0


def test_the_computation_goes_on_after_an_error() -> None:
    """An exception of a task passes through, with its traceback; the next computation is none the worse."""

    def fail(array: Any) -> Any:
        raise KeyError("no such thing")

    graph = {"x": Task("x", make, 1), "y": Task("y", fail, TaskRef("x"))}
    with pytest.raises(KeyError, match="no such thing") as caught:
        rd.get(graph, "y", budget="1MB")
    assert any(entry.name == "fail" for entry in caught.traceback)
    np.testing.assert_array_equal(rd.get(graph, "x", budget="1MB"), make(1))


def test_a_failing_task_is_run_again_for_a_debugger() -> None:
    """`rerun_exceptions_locally`: in the thread of the caller."""
    threads = []

    def fail(array: Any) -> Any:
        threads.append(threading.current_thread())
        raise KeyError(array[0])

    graph = {"x": Task("x", make, 1), "y": Task("y", fail, TaskRef("x"))}
    with pytest.raises(KeyError):
        rd.get(graph, "y", rerun_exceptions_locally=True)
    assert threads[0] is not threading.current_thread()
    assert threads[1:] == [threading.current_thread()]


def test_a_computation_inside_of_a_task_does_not_starve() -> None:
    """More of them than threads, each with another one inside, within the one budget."""

    def inner(number: int, depth: int) -> Any:
        x = da.full((40, 50), number, chunks=(10, 50)) + 1
        if depth:
            return dask.delayed(inner)(number, depth - 1).compute() + x.sum().compute()
        return x.compute().sum()

    numbers = [dask.delayed(inner)(number, 2) for number in range(12)]
    with rd.budget("200kB"):
        found = dask.compute(*numbers, num_workers=2)
    assert list(found) == [3 * 2_000 * (number + 1) for number in range(12)]
    assert rd.stats().operations > 12
    assert rd.stats().peak <= 200_000 + rd.stats().overshoot


def test_what_dask_releases_is_released() -> None:
    """A chain of tasks holds two arrays at a time, not all of them."""
    graph: dict[Any, Any] = {("x", 0): Task(("x", 0), make, 0)}
    for number in range(1, 50):
        graph["x", number] = Task(("x", number), add, TaskRef(("x", number - 1)))
    rd.get(graph, ("x", 49))
    assert rd.stats().peak <= 4 * ARRAY
    assert rd.stats().releases >= 45


def test_what_ready_tasks_take_is_evicted_last() -> None:
    """Tasks that take values in a random order: fewer run again than if what was used longest ago were evicted."""
    runs: list[int] = []
    taken: list[int] = []

    def noted(number: int) -> Any:
        runs.append(number)
        return make(number)

    def look(one: Any, other: Any, _: Any) -> float:
        taken.extend((int(one[0]), int(other[0])))
        return float(one[0] + other[0])

    graph: dict[Any, Any] = {("x", number): Task(("x", number), noted, number) for number in range(40)}
    for number in range(40):
        graph["first", number] = Task(("first", number), lambda x: float(x[0]), TaskRef(("x", number)))
    graph["all"] = Task("all", sum, List(*[TaskRef(("first", number)) for number in range(40)]))
    pairs = [random.Random(seed).sample(range(40), 2) for seed in range(150)]
    for turn, two in enumerate(pairs):
        arguments = [TaskRef(("x", number)) for number in two]
        graph["look", turn] = Task(("look", turn), look, *arguments, TaskRef("all"))
    found = rd.get(graph, [("look", turn) for turn in range(150)], budget=16 * ARRAY, num_workers=1)
    assert list(found) == list(map(sum, pairs))
    assert len(runs) - 40 < 0.85 * misses_of_lru(taken, 16)


def test_what_returns_nothing_runs_once() -> None:
    """A task with side effects: its result is small, and stays."""
    runs: list[int] = []
    graph: dict[Any, Any] = {}
    for number in range(20):
        graph["x", number] = Task(("x", number), make, number)
        graph["noted", number] = Task(("noted", number), lambda _, n: runs.append(n), TaskRef(("x", number)), number)
    noted = List(*[TaskRef(("noted", number)) for number in range(20)])
    everything = List(*[TaskRef(("x", number)) for number in range(5)])
    graph["end"] = Task("end", lambda _, arrays: sum(arrays)[0], noted, everything)
    assert rd.get(graph, "end", budget=8 * ARRAY) == 10
    assert sorted(runs) == list(range(20))


@pytest.mark.parametrize("copies", [1, 3])
def test_what_is_stored_in_the_array_of_a_task_is_there(copies: int) -> None:
    """`da.store` writes into its target on purpose, which stays as it was written."""
    x = da.ones((100, 40), chunks=(20, 40))
    targets = [dask.delayed(np.zeros)((100, 40)) for _ in range(copies)]
    stored = da.store([x] * copies, targets, compute=False, lock=False)
    with rd.budget("500kB"):
        (_, *found) = dask.compute(stored, *targets)
    for target in found:
        np.testing.assert_array_equal(target, np.ones((100, 40)))


def test_callbacks_see_values() -> None:
    """Dask's diagnostics are told of results, as without a budget."""
    seen: dict[Any, Any] = {}
    with Callback(posttask=lambda key, result, dsk, state, worker: seen.update({key: result})):
        rd.get({"x": Task("x", make, 1), "y": Task("y", same, TaskRef("x"))}, "y")
    np.testing.assert_array_equal(seen["y"], make(1))
    assert list(seen) == ["x", "y"]


def test_what_is_dear_moves_to_a_disk() -> None:
    """With a tier: bytes come back from there, and no task runs twice."""
    runs: list[int] = []

    def dear(number: int) -> Any:
        runs.append(number)
        for _ in range(20):
            np.linalg.svd(np.ones((60, 60)))
        return make(number)

    graph = {("x", n): Task(("x", n), dear, n) for n in range(8)}
    graph["end"] = Task("end", lambda: None)
    for n in range(8):
        graph["y", n] = Task(("y", n), add, TaskRef(("x", n)), TaskRef(("x", (n + 4) % 8)))
    rd.get(graph, [("y", n) for n in range(8)], budget=6 * ARRAY, tiers=rc.Disk(), num_workers=1)
    assert sorted(runs) == list(range(8))
    assert rd.stats().tiers[0].moves > 0


def test_objects_that_are_more_than_their_attributes_are_shared() -> None:
    """A lock, or what has one, is one of its kind in a computation; so are functions made in a task."""

    class Counter:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.count = 0

        def up(self, array: Any) -> Any:
            with self.lock:
                self.count += 1
            return array + 1

    def call_first(local: Any, array: Any) -> Any:
        return local["plus"][0](array)

    graph: dict[Any, Any] = {"counter": Task("counter", Counter), "x": Task("x", make, 1)}
    for number in range(5):
        graph["y", number] = Task(("y", number), Counter.up, TaskRef("counter"), TaskRef("x"))
        graph["local", number] = Task(("local", number), lambda n: {"plus": [lambda array: array + n]}, number)
        graph["z", number] = Task(
            ("z", number), lambda local, array: local["plus"][0](array), TaskRef(("local", number)), TaskRef("x")
        )
    found = rd.get(graph, ["counter", *[("y", n) for n in range(5)], *[("z", n) for n in range(5)]], budget="1MB")
    assert found[0].count == 5
    assert [array[0] for array in found[1:]] == [2.0] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0]


def test_arrays_are_read_only_inside_whoever_serves_them() -> None:
    """Without an adapter for NumPy, too; what leaves is the array that the task made."""
    array = make(1)
    kept, writable = _payloads.returned(array)
    assert (kept.flags.writeable, array.flags.writeable, writable) == (False, True, True)
    assert _payloads.leaving(kept, writable=writable) is array


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1, 1000), (1000, 1)])
def test_results_whose_strides_are_zero_are_writable(shape: tuple[int, ...]) -> None:
    """Empty ones, and those with a new axis; what `broadcast_to` repeats stays read-only."""

    def with_new_axis() -> Any:
        return np.ones(max(shape))[None if shape[0] == 1 else (..., None)]

    make = partial(np.ones, shape) if 0 in shape else with_new_axis
    array, repeated = rd.get({"a": (make,), "b": (np.ones, 3), "c": (np.broadcast_to, "b", (5, 3))}, ["a", "c"])
    array += 1
    assert (array.shape, repeated.flags.writeable) == (shape, False)


def test_containers_are_given_with_a_structure_of_their_own() -> None:
    """Of arrays alone, or with others inside: who changes them changes nothing of the value; arrays are shared."""
    array = make(1)
    for payload in ({"n": array, "total": 2}, [array, "text"], (array, 1.0), {"inner": [array]}, [(array,)]):
        given = _payloads.given(payload)
        ((own,), (part,)) = (
            [leaf for leaf in flat(value) if isinstance(leaf, np.ndarray)] for value in (given, payload)
        )
        assert (own.flags.writeable, part.flags.writeable, np.shares_memory(own, part)) == (False, True, True)
        assert type(given) is type(payload)
        if not isinstance(given, tuple):
            given.clear()
            assert payload


def flat(value: Any) -> list[Any]:
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in flat(part)]
    return [value]


def test_nested_tuples_cannot_be_changed() -> None:
    """However deep, and however often one is in another; unless there is something in them that can."""
    deep: Any = ()
    wide: Any = ("key", 1)
    for _ in range(5_000):
        deep = (deep, 1)
    for _ in range(60):
        wide = (wide, wide)
    assert _payloads.is_fixed(deep)
    assert _payloads.is_fixed(wide)
    assert not _payloads.is_fixed((wide, ([],)))


def test_a_copy_that_fails_leaves_nothing_to_the_next() -> None:
    """What it had begun with has gone, and others may lie in its place."""

    class State:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __reduce__(self) -> Any:
            return State, (), {"parts": [list(part) if isinstance(part, list) else part for part in self.parts]}

    for number in range(20):
        values = {0: State([7], threading.Lock()), 1: [[number], [number]], 2: State([number, number])}
        made = _payloads.copied(values)
        assert made[0] is values[0]
        assert made[1] == [[number], [number]]
        assert made[2].parts == [[number, number]]


@given(st.integers(0, 5_000))
def test_the_weight_of_a_task_is_that_of_what_it_holds(nbytes: int) -> None:
    """Wherever it holds it; what other tasks make is not its own."""
    array = np.zeros(nbytes, dtype=np.uint8)
    light = _recipe.weight(Task("y", add, TaskRef("x")))
    for task in (
        Task("y", add, array, TaskRef("x")),
        Task("y", add, List(array, TaskRef("x"))),
        Task("y", partial(add, array), TaskRef("x")),
        Task("y", add, DataNode(None, array)),
    ):
        assert nbytes <= _recipe.weight(task) - light <= nbytes + 2_000


def test_a_copy_that_is_not_installed_is_an_error() -> None:
    """Nobody would find the adapters for arrays; the error says so, and the cure."""
    code = "import importlib.metadata as m; m.entry_points = lambda **_: (); import recompute_dask"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError: recompute_dask was found on the path, but recompute-cache is not installed" in done.stderr
    assert "pip install" in done.stderr


def test_stats_before_any_computation_are_an_error() -> None:
    """One that says what to do."""
    code = "import recompute_dask as rd; rd.stats()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "nothing was computed yet" in done.stderr


def test_the_scheduler_does_not_import_distributed() -> None:
    """It takes a second to import, and is for clusters."""
    code = "import recompute_dask, sys; print('distributed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("version", ["2024.12.1", "2025.12.0", "2027.1.0", "2028.4.1", "2.30.0"])
def test_another_dask_is_an_error(version: str) -> None:
    """One that names the versions that are known to work, and the cure."""
    with pytest.raises(ImportError, match=rf"dask {_installed.OLDEST} to .* {version} is installed.*pip install"):
        _installed.check_version("dask", version)


@pytest.mark.parametrize("version", ["2026.1.0", "2026.8.0", "2026.12.3"])
def test_a_dask_of_the_range_is_none(version: str) -> None:
    """The first and the last that were tried, and what follows within the year."""
    _installed.check_version("dask", version)
    assert version >= _installed.OLDEST


def test_the_former_name_of_tiers_is_refused() -> None:
    """Instead of a computation that spills nothing, in silence."""
    with pytest.raises(TypeError, match="`disk` is called `tiers`"):
        rd.get({"x": 1}, "x", disk="1GB")
    with dask.config.set({"recompute.disk": "1GB"}), pytest.raises(TypeError, match=r"recompute\.tiers"):
        rd.get({"x": 1}, "x")
