"""Graphs of arrays, opened: blocks are joined one at a time, with the results of plain threads to the last bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
dask = pytest.importorskip("dask", reason="the extra 'dask' is not installed")
da = pytest.importorskip("dask.array", reason="the extra 'dask' is not installed")

from dask._task_spec import DataNode, List, Task, TaskRef  # noqa: E402  # after importorskip
from dask.core import flatten  # noqa: E402
from dask_graphs import array_programs, make  # noqa: E402

import recompute_dask as rd  # noqa: E402
from recompute_dask._metadata import Metadata, graph_of  # noqa: E402
from recompute_dask._opened import opened  # noqa: E402
from recompute_dask._running import Together  # noqa: E402


def blocks(side: int = 400, chunk: int = 100) -> Any:
    """Random numbers; a chunk has 80 kB."""
    return da.random.default_rng(1).random((side, side), chunks=(chunk, chunk))


def centred(x: Any) -> Any:
    """Needs all of x twice."""
    return x - x.mean(axis=0)


def expression(x: Any) -> Any:
    """What `compute` gives to a scheduler."""
    from dask._expr import FinalizeCompute
    from dask.base import collections_to_expr

    return FinalizeCompute(collections_to_expr([x])).optimize()  # type: ignore[no-untyped-call]  # Dask's


def same(wanted: Any, found: Any) -> bool:
    return type(wanted) is type(found) and wanted.dtype == found.dtype and wanted.tobytes() == found.tobytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(array_programs(), st.floats(1.0, 4.0), st.integers(1, 3))
def test_array_programs_have_the_results_of_plain_threads(program: Any, share: float, threads: int) -> None:
    """To the last bit, whatever is rechunked, overlapped, cut and added up, within a multiple of what it needs."""
    wanted = np.asarray(program.compute(scheduler="threads", num_workers=2))
    budget = max(1_000, int(share * rd.least(program).nbytes))
    try:
        found = np.asarray(program.compute(scheduler=rd.get, budget=budget, num_workers=threads))
    except rc.BudgetError:
        assume(False)
    assert same(wanted, found)
    stats = rd.stats()
    assert stats.peak <= budget + stats.overshoot


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(array_programs(), st.integers(0, 20_000))
def test_an_opened_graph_is_the_same_function(program: Any, room: int) -> None:
    """Without the joins, by Dask's own scheduler: its tasks still do what the tasks before did."""
    graph = expression(program)
    keys = list(flatten(graph.__dask_keys__()))  # type: ignore[no-untyped-call]  # Dask's
    tasks, joins = opened(graph_of(graph), set(keys), Metadata(graph), room)
    (wanted,) = dask.get(graph.__dask_graph__(), keys)
    (found,) = dask.get(tasks, keys)
    assert same(np.asarray(wanted), np.asarray(found))
    for key, join in joins.items():
        assert set(join.sources) <= set(tasks[key].dependencies)
        covered = np.zeros(join.block.shape, dtype=int)
        for part in join.parts:
            assert tuple(map(len, part.cut)) == tuple(map(len, part.place))
            covered[tuple(slice(span.start, span.stop) for span in part.place)] += 1
        assert (covered == 1).all()


PROGRAMS = {
    "rechunk": lambda: centred(blocks().rechunk((50, 200))).max(axis=0),
    "rows": lambda: blocks().rechunk((10, 400)).sum(axis=1),
    "columns": lambda: blocks().rechunk((400, 10)).sum(axis=0),
    "fft by axis": lambda: abs(da.fft.fft(blocks().rechunk((10, 400)), axis=1)).sum(axis=0),
    "map_overlap": lambda: da.map_overlap(lambda a: a + np.roll(a, 1, 0), blocks(), depth=2, boundary="reflect").max(),
    "median": lambda: da.median(blocks().rechunk((400, 10)), axis=0),
    "cumulative sums": lambda: da.cumsum(blocks(800), axis=0, method="blelloch").max(axis=1),
    "qr": lambda: da.linalg.qr(da.random.default_rng(2).random((4000, 20), chunks=(250, 20)))[0].std(axis=0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_array_programs_fit_into_half_of_what_plain_threads_take(name: str) -> None:
    """The peak without a budget is that of Dask's own scheduler, which keeps the same results."""
    program = PROGRAMS[name]()
    wanted = program.compute(scheduler="threads", num_workers=2)
    program.compute(scheduler=rd.get, num_workers=2)
    budget = rd.stats().peak // 2
    found = program.compute(scheduler=rd.get, num_workers=2, budget=budget)
    assert same(wanted, found)
    assert rd.stats().peak <= 1.05 * budget


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rechunk_fits_into_what_it_needs_at_once(threads: int) -> None:
    """Whatever the number of threads: what does not fit beside others waits for them."""
    program = blocks().rechunk((50, 200)).max(axis=1)
    wanted = program.compute(scheduler="threads")
    least = rd.least(program)
    assert least.nbytes == 160_000  # a block, and what is joined
    for _ in range(5):
        found = program.compute(scheduler=rd.get, budget=int(1.15 * least.nbytes), num_workers=threads)
        assert same(wanted, found)


def test_a_program_with_margins_fits_again_and_again() -> None:
    """On two threads, one of which waits with a block that it has just made."""
    program = da.map_overlap(lambda a: a + 1, blocks(800), depth=2, boundary="reflect", dtype=float).sum(axis=0)
    wanted = program.compute(scheduler="threads")
    for _ in range(10):
        assert same(wanted, program.compute(scheduler=rd.get, budget=400_000, num_workers=2))


def test_the_least_is_known_before_anything_runs() -> None:
    """Bytes, the task that sets them, and for how many tasks nothing is known."""
    runs: list[int] = []

    def noted(array: Any) -> Any:
        runs.append(1)
        return array

    x = blocks().map_blocks(noted, dtype=float, meta=np.empty((0, 0)))
    least = rd.least(x[:100, :100] + x[100:200, 300:])
    assert (least.nbytes, least.unknown) == (240_000, 0)
    assert rd.least({"a": x, "b": [x.sum()]}).nbytes == rd.least([x, x.sum()]).nbytes > 400 * 400 * 8
    assert rd.least(x.sum()).unknown >= 16  # Dask does not say what the sum of a block is
    assert isinstance(least.task, tuple)
    assert rd.least([x.sum(), x.rechunk((400, 400)).sum()]).nbytes == 400 * 400 * 8 + 80_000
    assert not runs
    graph = {"x": Task("x", make, 1), "y": Task("y", make, TaskRef("x"))}
    assert rd.least(graph)[::2] == (0, 2)


def test_with_less_than_the_least_an_error_names_its_task() -> None:
    """No task needs more, and so it is the one that does not fit."""
    program = blocks().rechunk((400, 400)).sum()
    least = rd.least(program)
    with pytest.raises(rc.BudgetError, match=r"least says") as caught:
        program.compute(scheduler=rd.get, budget=least.nbytes - 100_000)
    assert repr(least.task) in str(caught.value)


def test_blocks_that_are_not_what_the_metadata_say_are_joined_by_their_own_task() -> None:
    """Masked arrays, other types and other shapes than Dask was told."""
    plain = np.arange(160_000.0).reshape(400, 400)
    for make_block in (
        lambda block: np.ma.masked_greater(block, 0.5),
        lambda block: block.astype("f4"),
        lambda block: block.astype(object),
        lambda block: block.astype("f8", order="F"),
    ):
        x = blocks().map_blocks(make_block, dtype=float, meta=np.empty((0, 0)))
        program = x.rechunk((50, 400))
        wanted, found = program.compute(scheduler="threads"), program.compute(scheduler=rd.get, budget="6MB")
        assert type(wanted) is type(found)
        assert wanted.dtype == found.dtype
        np.testing.assert_array_equal(wanted, found)
        if isinstance(wanted, np.ma.MaskedArray):
            np.testing.assert_array_equal(np.ma.getmaskarray(wanted), np.ma.getmaskarray(found))
    wrong = blocks().map_blocks(lambda block: block[:50], dtype=float, meta=np.empty((0, 0)))
    program = wrong.rechunk((400, 400))
    assert same(program.compute(scheduler="threads"), program.compute(scheduler=rd.get, budget="4MB"))
    parts = da.from_array(plain, chunks=(100, 100)).rechunk((400, 50))
    assert same(plain, parts.compute(scheduler=rd.get, budget="4MB"))


def test_what_was_joined_is_the_callers() -> None:
    """An array that can be written to, and that nobody else sees."""
    x = blocks().rechunk((400, 200))
    first = x.compute(scheduler=rd.get, budget="2MB")
    before = first.copy()
    first += 1
    assert same(before, x.compute(scheduler=rd.get, budget="2MB"))


def test_a_source_of_a_graph_may_be_joined() -> None:
    """Data in a graph is read where it lies."""
    name = blocks().name
    graph: dict[Any, Any] = {
        (name, i, j): DataNode((name, i, j), np.full((100, 100), i + j)) for i in range(4) for j in range(4)
    }
    rows = [[TaskRef((name, i, j)) for j in range(4)] for i in range(4)]
    graph["all"] = Task("all", da.core.concatenate3, List(*[List(*row) for row in rows]))
    found = rd.get(graph, "all", budget="2MB")
    np.testing.assert_array_equal(found[::100, ::100], np.add.outer(range(4), range(4)))


def test_a_task_that_runs_alone_waits_for_the_others() -> None:
    """And none begins before it has ended, but for those inside of it."""
    together, steps = Together(), []
    first, second = threading.Event(), threading.Event()

    def other() -> None:
        with together.one():
            first.set()
            second.wait(10)
            steps.append("other")

    thread = threading.Thread(target=other)
    with together.one() as outermost:
        assert outermost
        thread.start()
        first.wait(10)
        second.set()
        together.wait_to_be_alone()
        steps.append("alone")
        with together.one() as outermost:
            assert not outermost
        late = threading.Thread(target=other)
        late.start()
        assert steps == ["other", "alone"]
    late.join(10)
    thread.join(10)
    assert steps == ["other", "alone", "other"]


def test_a_budget_that_is_a_function_opens_graphs_too() -> None:
    """Of 16 blocks, 2 fit."""
    program = blocks().rechunk((10, 400)).sum(axis=1)
    wanted = program.compute(scheduler="threads")
    assert same(wanted, program.compute(scheduler=rd.get, budget=lambda used: 200_000, num_workers=1))
    assert rd.stats().peak <= 200_000 + rd.stats().overshoot


def test_anomalies_of_more_rows_take_no_more_memory() -> None:
    """Rows are loaded twice, about, instead of kept (distributed#2602)."""
    loads: list[int] = []

    def load(number: int) -> Any:
        loads.append(number)
        return np.random.default_rng(number).random((1, 10_000))

    for rows in (50, 100, 200):
        parts = [da.from_delayed(dask.delayed(load, pure=True)(n), (1, 10_000), float) for n in range(rows)]
        data = da.concatenate(parts)
        program = (data - data.mean(0)).mean(1)
        wanted = program.compute(scheduler="threads")
        loads.clear()
        assert same(wanted, program.compute(scheduler=rd.get, budget="3MB", num_workers=2))
        assert rows < len(loads) <= 3 * rows
        assert rd.stats().peak <= 1.05 * 3_000_000


@pytest.mark.parametrize("wrong", [5, "x", None, [], [5]])
def test_what_is_no_graph_is_refused(wrong: Any) -> None:
    """With what there may be instead."""
    with pytest.raises(TypeError, match="least takes a collection"):
        rd.least(wrong)
