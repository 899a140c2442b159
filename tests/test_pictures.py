"""Pictures of residency: the right bars from the events of a cache, in a figure that stays small."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._events import Added, Event, Evicted, Forgotten, Performed, TakenBack
from recompute._pictures import Bar, bars, residency, save
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
        Bar(1, 0.0, 5.0, False),
        Bar(2, 0.0, 1.0, False),
        Bar(2, 3.0, 4.0, True),
        Bar(2, 4.0, 5.0, False),
        Bar(3, 1.0, 5.0, False),
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
        assert [bar.again for bar in own] == [False] + [True] * (len(own) - 1)
        for bar, following in pairwise(own):
            assert bar.start <= bar.end <= following.start


def test_pictures_without_matplotlib_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is an ImportError with the command to run."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'recompute-cache\[plot\]'"):
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
    assert [len(each.get_paths()) for each in above.collections] == [4, 1]
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
def test_many_bars_are_few_objects(tmp_path: Path) -> None:
    """Thousands of bars are one collection a colour, and a vector file of them stays small."""
    events: list[Event] = []
    for number in range(1, 4_001):
        events.append(Performed(2.0 * number, 10, "f", 1.0, False, (number,), (10,), ()))
        events.append(Evicted(2.0 * number, 0, number, 10, "pressure"))
        events.append(Performed(2.0 * number + 1, 10, "f", 1.0, True, (number,), (10,), ()))
        events.append(Evicted(2.0 * number + 1, 0, number, 10, "pressure"))
    figure = residency(events, labels={number: str(number) for number in range(1, 4_001)})
    above = figure.axes[0]
    assert [len(each.get_paths()) for each in above.collections] == [4_000, 4_000]
    assert len(above.get_yticks()) <= 24
    assert save(figure, tmp_path / "many.svg").stat().st_size < 1_000_000


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


def test_drawing_opens_no_window() -> None:
    """Neither importing the module loads matplotlib, nor drawing loads pyplot, which has global state."""
    code = (
        "import sys, recompute._pictures as p; from recompute._events import Added; print('matplotlib' in sys.modules);"
        "p.residency([Added(0.0, 1, 1, 1, 'cpu')]); print('matplotlib.pyplot' in sys.modules)"
    )
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
