"""Pictures: what is drawn is what the data say, in figures that stay small."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._engine.events import Added, Event, Evicted, Fetched, Forgotten, Performed, TakenBack
from recompute._pictures.bars import Bar, bars, large
from recompute._pictures.style import looks
from recompute._traces.chain import chain
from recompute.pictures import (
    REGIMES,
    ChainPoint,
    Floor,
    Point,
    accesses,
    chain_cost,
    memory,
    moments,
    overhead,
    plan_events,
    residency,
    save,
)
from recompute.planners import METHODS, plan
from recompute.simulator import iterate, simulate
from recompute.testing import ManualClock

EVENTS: list[Event] = [
    Added(0.0, 100, 1, 100, "cpu"),
    Performed(1.0, 300, "f", 1.0, False, (2,), (200,), (1,)),
    Evicted(1.0, 100, 2, 200, "pressure"),
    Performed(3.0, 500, "g", 2.0, False, (3,), (400,), (1,)),
    Performed(4.0, 700, "f", 1.0, True, (2,), (200,), (1,)),
    Evicted(4.0, 500, 2, 200, "request"),
    TakenBack(4.0, 700, 2, 200),
    Performed(5.0, 700, "h", 1.0, False, (3,), (400,), (3,)),
    Forgotten(5.0, 300, 3),
]


def program(steps: list[tuple[int, bool]]) -> tuple[list[Event], int]:
    """The events of a real cache in which each step makes a value or gets an old one; and its peak."""
    clock = ManualClock()

    def work(before: bytes) -> bytes:
        clock.advance(1.0)
        return before[:1] or b"x"

    events: list[Event] = []
    with rc.Cache(400, clock=clock) as cache:
        cache.subscribe(events.append)
        values = [rc.pure(b"")]
        for which, make in steps:
            value = values[which % len(values)]
            if make:
                values.append(rc.ap(work, value))
            else:
                value.get()
    return events, cache.stats().peak


def test_a_bar_lasts_from_computation_to_eviction() -> None:
    """Sources begin at once, results with their computation; recomputed stays are told apart."""
    assert sorted(bars(EVENTS), key=lambda bar: (bar.storage, bar.start, bar.end)) == [
        Bar(1, 0.0, 5.0),
        Bar(2, 0.0, 1.0),
        Bar(2, 3.0, 4.0, "again"),
        Bar(2, 4.0, 5.0),
        Bar(3, 1.0, 5.0),
    ]
    assert {bar.storage for bar in bars(EVENTS, storages=[2])} == {2}


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=40))
def test_bars_of_a_value_follow_one_another(steps: list[tuple[int, bool]]) -> None:
    """Stays of a storage never overlap, the first is the only one not recomputed, and none lasts less than no time."""
    events, _ = program(steps)
    stays: dict[int, list[Bar]] = {}
    for bar in bars(events):
        stays.setdefault(bar.storage, []).append(bar)
    for own in stays.values():
        own.sort(key=lambda bar: (bar.start, bar.end))
        assert [bar.how for bar in own] == ["first"] + ["again"] * (len(own) - 1)
        for bar, following in pairwise(own):
            assert bar.start <= bar.end <= following.start


def test_pictures_without_matplotlib_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is an ImportError with the command to run."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plot\]' in a checkout"):
        residency(EVENTS)


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")


@pytest.mark.usefixtures("_matplotlib")
def test_the_figure_shows_values_over_bytes() -> None:
    """Two axes share the time: values with their names and a legend above, bytes and the budget line below."""
    figure = residency(EVENTS, labels={1: "x", 2: "f(x)", 3: "g(x)"}, title="Three values", budget=600)
    above, below = figure.axes
    assert [text.get_text() for text in above.get_yticklabels()] == ["x", "f(x)", "g(x)"]
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["first computed", "recomputed"]
    assert figure.get_suptitle() == "Three values"
    assert [len(collection.get_paths()) for collection in above.collections] == [4, 1]
    assert above.get_xlim() == below.get_xlim() == (0.0, 5.0)
    assert [list(line.get_ydata()) for line in below.lines] == [[600.0, 600.0]]
    assert below.get_xlabel() == "compute time [s]"


@pytest.mark.usefixtures("_matplotlib")
def test_units_suit_the_figures() -> None:
    """Short runs are drawn in milliseconds or microseconds, large budgets in megabytes."""
    events: list[Event] = [Performed(0.002, 3_000_000, "f", 0.002, False, (1,), (3_000_000,), ())]
    _, below = residency(events).axes
    assert [below.get_xlabel(), below.get_ylabel()] == ["compute time [ms]", "used [MB]"]


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_figures_are_saved_by_ending(tmp_path: Path, ending: str) -> None:
    """The ending decides the format, and the absolute path comes back."""
    path = save(residency(EVENTS, budget=600), tmp_path / f"picture.{ending}")
    assert path == tmp_path / f"picture.{ending}"
    assert path.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml", "pdf": b"%PDF-"}[ending]


@pytest.mark.usefixtures("_matplotlib")
def test_many_bars_are_one_image(tmp_path: Path) -> None:
    """Thousands of bars are one image, in which even the shortest is to be seen, and a vector file of it is small."""
    events: list[Event] = []
    for number in range(1, 4_001):
        events.append(Performed(2.0 * number, 10, "f", 1.0, False, (number,), (10,), ()))
        events.append(Evicted(2.0 * number, 0, number, 10, "pressure"))
        events.append(Performed(2.0 * number + 1, 10, "f", 1.0, True, (number,), (10,), ()))
        events.append(Evicted(2.0 * number + 1, 0, number, 10, "pressure"))
    figure = residency(events, labels={number: str(number) for number in range(1, 4_001)})
    above = figure.axes[0]
    (image,) = above.images
    assert above.collections[:] == []
    assert image.get_extent() == [0, 8_000, -0.5, 3_999.5]
    shown = image.get_array()
    assert all((row != 255).any() for row in shown)
    assert {
        "blue": bool((shown[:, :, 2] > shown[:, :, 0]).any()),
        "vermilion": bool((shown[:, :, 0] > shown[:, :, 2]).any()),
    } == {"blue": True, "vermilion": True}
    assert len(above.get_yticks()) <= 24
    assert save(figure, tmp_path / "many.svg").stat().st_size < 200_000
    assert save(figure, tmp_path / "many.png").stat().st_size < 100_000


@pytest.mark.usefixtures("_matplotlib")
def test_small_values_can_be_left_out() -> None:
    """`least` keeps the storages of at least that share of the most bytes used, and the axis says so."""
    above = residency(EVENTS, least=0.25, labels={1: "x", 2: "f(x)", 3: "g(x)"}).axes[0]
    assert [text.get_text() for text in above.get_yticklabels()] == ["f(x)", "g(x)"]
    assert above.get_ylabel() == "values of at least 25% of the peak"
    assert large(EVENTS, 0.5) == {3}
    with pytest.raises(ValueError, match="nothing to draw"):
        residency(EVENTS, least=0.9)


@pytest.mark.usefixtures("_matplotlib")
def test_marks_are_lines_with_their_text() -> None:
    """A mark is a line through both axes; the start of the backward pass is called so; units may have any name."""
    above, below = residency(EVENTS, marks=[(3.0, "BACKWARD"), (4.0, "step 2")], unit="operations").axes
    for axes in (above, below):
        assert [line.get_xdata()[0] for line in axes.lines][-2:] == [3.0, 4.0]
    assert [text.get_text() for text in above.texts] == ["backward pass", "step 2"]
    assert below.get_xlabel() == "compute time [operations]"


def test_marks_fall_before_the_operation_they_name() -> None:
    """Marks are counted in first runs; what was recomputed for that operation comes after the mark."""
    assert moments(EVENTS, [(0, "start"), (1, "g"), (2, "h"), (3, "end")]) == [(0.0, "start"), (1.0, "g"), (3.0, "h")]
    assert moments(EVENTS, []) == []


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("events", [[], [Evicted(1.0, 0, 1, 10, "release")]])
def test_nothing_to_draw_is_an_error(events: list[Event]) -> None:
    """Without a value that came into memory there is no picture."""
    with pytest.raises(ValueError, match="nothing to draw"):
        residency(events)


@pytest.mark.usefixtures("_matplotlib")
def test_a_moment_can_be_drawn(tmp_path: Path) -> None:
    """Sources alone, which take no compute time, are a picture too."""
    events: list[Event] = [Added(0.0, 0, 1, 0, "cpu")]
    assert save(residency(events), tmp_path / "moment.png").exists()


@pytest.mark.usefixtures("_matplotlib")
def test_the_budget_line_is_not_crossed() -> None:
    """In the picture of a real run the bytes used stay under the budget."""
    events, peak = program([(number, True) for number in range(30)] + [(number, False) for number in range(30)])
    below = residency(events, budget=400).axes[1]
    highest = max(float(vertex[1]) for path in below.collections[0].get_paths() for vertex in path.vertices)
    assert 0 < highest <= peak <= 400


@pytest.mark.usefixtures("_matplotlib")
def test_memory_is_a_line_for_each_policy() -> None:
    """Lines with names in order, the budget, a run without one behind, and a triangle where each mark falls."""
    other: list[Event] = [Added(0.0, 100, 1, 100, "cpu"), Performed(2.0, 300, "f", 2.0, False, (2,), (200,), (1,))]
    figure = memory(
        {"default": EVENTS, "lru (oom)": other},
        budget=600,
        whole=EVENTS,
        title="Two",
        marks={"default": [(3.0, "BACKWARD")], "lru (oom)": [(1.0, "BACKWARD")]},
    )
    (axes,) = figure.axes
    drawn = {line.get_label(): line for line in axes.lines}
    assert list(drawn["default"].get_xdata()) == [0.0, 1.0, 3.0, 4.0, 5.0]
    assert list(drawn["default"].get_ydata()) == [100, 300, 500, 700, 700]
    assert list(drawn["lru (oom)"].get_ydata()) == [100, 300]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["without a budget", "default", "lru (oom)"]
    assert [text.get_text() for text in axes.texts] == ["budget", "backward pass"]
    assert sorted(line.get_xdata()[0] for line in axes.lines if line.get_marker() == "^") == [1.0, 3.0]
    assert [600, 600] in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_ylabel() == "memory used [bytes]"


@pytest.mark.usefixtures("_matplotlib")
def test_long_runs_keep_their_peaks() -> None:
    """Thousands of moments are thinned, and the most of each stretch stays."""
    events: list[Event] = [
        Performed(float(number), 900 if number == 7_001 else number % 10, "f", 1.0, False, (1,), (1,), ())
        for number in range(1, 10_001)
    ]
    (line,) = memory({"dtr": events}).axes[0].lines
    assert len(line.get_xdata()) <= 501
    assert max(line.get_ydata()) == 900
    assert line.get_xdata()[-1] == pytest.approx(10_000, rel=0.01)


POINTS = [
    Point("a.jsonl", "dtr", 0.9, 1.1),
    Point("a.jsonl", "dtr", 0.8, 1.3),
    Point("a.jsonl", "dtr", 0.7, None),
    Point("a.jsonl", "lru", 0.9, None),
    Point("a.jsonl", "own", 0.9, 1.05, "planner", 1.02),
    Point("a.jsonl", "own", 0.8, 1.2, "planner", 1.04),
    Point("b.jsonl.gz", "dtr", 0.8, 1.0),
]


@pytest.mark.usefixtures("_matplotlib")
def test_overhead_has_a_panel_for_each_trace() -> None:
    """A line for each policy and planner, a cross where it fails, bars for bounds, grey for what all need."""
    figure = overhead(POINTS, floors={"a.jsonl": Floor(0.1, 0.3)}, title="Overhead")
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    lines = {(line.get_marker(), *line.get_xdata()): list(line.get_ydata()) for line in first.lines}
    dtr, own = looks(["dtr", "own"]).values()
    assert lines[dtr.marker, 0.9, 0.8, 0.7][:2] == [1.1, 1.3]
    assert lines[own.marker, 0.9, 0.8] == [1.05, 1.2]
    assert lines["x", 0.8] == [1.3]
    assert lines["x", 0.9] == [2.0]  # it fails at once
    assert lines["_", 0.9, 0.8] == [1.02, 1.04]
    assert len(first.patches) == 2
    assert second.patches[:] == []
    assert first.get_xlim() == second.get_xlim() == (0.0, 1.0)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "dtr", "lru", "own", "fails below", "proved bound", "inputs and weights", "+ largest operation",
    ]  # fmt: skip
    assert first.get_ylabel().startswith("overhead")
    assert figure.get_suptitle() == "Overhead"


@pytest.mark.usefixtures("_matplotlib")
def test_replays_are_points() -> None:
    """What `simulate` returns can be drawn as it is; the floor is that of the program."""
    program = chain(16)
    runs = [simulate(program, of_peak=share, policy="dtr") for share in (0.9, 0.5)]
    (axes,) = overhead(runs, floors={program.name: Floor.of(program, 17)}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[run.overhead for run in runs]]
    assert Floor.of(program, 17) == Floor(0.0, 3 / 17)


class _Round:
    """A run of the policy dtr."""

    trace, policy, search, candidates_scored = "a.jsonl", "dtr", "exact", 0

    def __init__(self, budget_ratio: float, iteration: int, overhead: float | None) -> None:
        self.budget_ratio, self.iteration, self.overhead = budget_ratio, iteration, overhead


@pytest.mark.usefixtures("_matplotlib")
def test_the_last_round_is_a_line_of_its_own() -> None:
    """The first round is that of the policy; the last one looks like it, but hollow, and fails where one before did."""
    rounds = [(0.9, 1, 1.2), (0.9, 2, 1.15), (0.9, 3, 1.1), (0.8, 1, None), (0.8, 2, 1.3), (0.8, 3, 1.25)]
    figure = overhead([_Round(*figures) for figures in (*rounds, (0.7, 1, 1.5), (0.7, 2, None), (0.6, 1, None))])
    (axes,) = figure.axes
    lines = {line.get_markerfacecolor(): line for line in axes.lines if line.get_marker() != "x"}
    look = looks(["dtr"])["dtr"]
    assert list(lines) == ["white", look.colour]
    assert [line.get_color() for line in lines.values()] == [look.colour] * 2
    for line, heights in zip(lines.values(), ([1.1, 1.25, None, None], [1.2, None, 1.5, None]), strict=True):
        assert list(line.get_xdata()) == [0.9, 0.8, 0.7, 0.6]
        assert list(line.get_ydata()) == [pytest.approx(height or float("nan"), nan_ok=True) for height in heights]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["dtr", "dtr, round 3", "fails below"]


@pytest.mark.usefixtures("_matplotlib")
def test_accesses_are_lines_of_policy_and_search() -> None:
    """Candidates scored on a logarithmic axis; the search is named only where there are several."""
    program = chain(16)
    runs = [
        simulate(program, of_peak=share, policy="dtr", search=search)
        for search in ("exact", "sample")
        for share in (0.9, 0.5)
    ]
    figure = accesses([*runs, simulate(program, of_peak=1e-9, policy="dtr")])
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert sorted(list(line.get_ydata()) for line in axes.lines) == sorted(
        [run.candidates_scored for run in runs[at : at + 2]][::-1] for at in (0, 2)
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dtr, exact", "dtr, sample"]
    assert [text.get_text() for text in accesses(runs[:2]).legends[0].get_texts()] == ["dtr"]
    assert len(accesses(iterate(program, of_peak=0.5, iterations=3, policy="dtr")).axes[0].lines[0].get_xdata()) == 1


@pytest.mark.usefixtures("_matplotlib")
def test_the_chain_is_drawn_beside_its_optimum() -> None:
    """Operations per step for each policy, and no policy is below the optimum under the same budget."""
    points = [
        ChainPoint("dtr-eq", n, regime, 2 * n * (simulate(chain(n), grown(n), policy="dtr-eq", limit=50).overhead or 0))
        for regime, grown in REGIMES.items()
        for n in (8, 16, 32)
    ]
    figure = chain_cost([*points, ChainPoint("lru", 8, next(iter(REGIMES)), None)], title="Chain")
    assert [axes.get_title() for axes in figure.axes] == [f"budget {regime} values" for regime in REGIMES]
    for axes in figure.axes:
        best = next(line for line in axes.lines if line.get_linewidth() == 5)
        (own,) = [line for line in axes.lines if line.get_marker() == looks(["dtr-eq"])["dtr-eq"].marker]
        assert list(best.get_xdata()) == list(own.get_xdata()) == [8, 16, 32]
        assert all(least <= cost for least, cost in zip(best.get_ydata(), own.get_ydata(), strict=True))
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.usefixtures("_matplotlib")
def test_a_plan_is_drawn_like_a_run() -> None:
    """The events of a plan have its peak, its cost, and a run for each computation."""
    program = chain(12)
    found = plan(program, 5, "revolve")
    events = plan_events(program, found)
    assert max(event.used for event in events) == found.peak
    assert events[-1].time <= found.overhead * program.model_time == found.computes
    assert sum(isinstance(event, Performed) for event in events) == found.computes
    assert sum(isinstance(event, Performed) and event.again for event in events) == found.computes - 24
    assert [text for _, text in moments(events, program.marks)] == ["BACKWARD"]
    above = residency(events, unit="operations").axes[0]
    assert [len(collection.get_paths()) for collection in above.collections] == [
        len([bar for bar in bars(events) if bar.how == how]) for how in ("first", "again")
    ]


def test_names_are_told_apart_three_ways() -> None:
    """Policies differ in colour, in marker and in dashes; a name looks alike alone and among others."""
    policies = looks(["default", "dtr-eq", "dtr", "dtr-local", "msps", "lru", "size", "random"])
    for kind in ("colour", "marker", "dashes"):
        assert len({getattr(look, kind) for look in policies.values()}) == len(policies)
    assert looks(["lru"])["lru"] == policies["lru"] == looks(["lru (oom)"])["lru (oom)"]
    methods = looks(METHODS)
    assert len({(look.colour, look.marker, look.hollow) for look in (*policies.values(), *methods.values())}) == len(
        policies
    ) + len(methods)
    strangers = looks(["dtr", *[f"mine {number}" for number in range(6)]])
    assert len({look.marker for look in strangers.values()}) == 7


EMPTY: list[Callable[[], object]] = [
    lambda: memory({}),
    lambda: memory({"dtr": []}),
    lambda: overhead([]),
    lambda: accesses([]),
    lambda: chain_cost([]),
    lambda: chain_cost([ChainPoint("dtr", 8, "2 √n", None)]),
]


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("draw", EMPTY)
def test_no_picture_without_content(draw: Callable[[], object]) -> None:
    """What has nothing to show is an error that says so."""
    with pytest.raises(ValueError, match="nothing to draw"):
        draw()


@pytest.mark.usefixtures("_matplotlib")
def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    """Files have no dates and no random names, and text in SVG stays text; an unknown ending is refused."""
    for ending in ("png", "svg", "pdf"):
        files = [save(overhead(POINTS, title="Two traces"), tmp_path / f"{number}.{ending}") for number in (1, 2)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert ">Two traces</text>" in (tmp_path / "1.svg").read_text()
    with pytest.raises(ValueError, match=r"must be one of \.png, \.svg, \.pdf"):
        save(overhead(POINTS), tmp_path / "picture.gif")


def test_drawing_opens_no_window() -> None:
    """Neither importing the module loads matplotlib, nor drawing loads pyplot, which has global state."""
    code = (
        "import sys, recompute.pictures as p; from recompute.events import Added; print('matplotlib' in sys.modules);"
        "p.residency([Added(0.0, 1, 1, 1, 'cpu')]); print('matplotlib.pyplot' in sys.modules)"
    )
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_where_a_value_lay() -> None:
    """A bar in a tier begins where the one in memory ends, up to the fetch that brings the value back."""
    events: list[Event] = []
    run = simulate(chain(40), 9, tier="1B/s", limit=50.0, listener=events.append)
    assert run.moved_bytes > 0
    drawn = bars(events)
    moved = [bar for bar in drawn if bar.how == "moved"]
    fetched = [event for event in events if isinstance(event, Fetched)]
    assert len(moved) >= len(fetched) > 0
    for bar in moved:
        before = [other for other in drawn if other.storage == bar.storage and other.end == bar.start]
        assert any(other.how != "moved" for other in before)
    assert {bar.how for bar in drawn} == {"first", "again", "moved", "fetched"}
