"""What a cache shows of itself: tables, records of `logging`, and a live view."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import os
import re
import subprocess
import sys
import warnings
from contextlib import suppress
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from lib.vectors import vector
from recompute import _form
from recompute._budget import format_bytes
from recompute._engine.events import Added, Event, Evicted, Performed
from recompute._engine.stats import PoolStats
from recompute._watching import Recent, parts, picture
from recompute.testing import ManualClock
from recompute.text import List, Table, aligned, fitted, seconds, warn

TEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30).map(lambda text: text.strip())
"""Of one line."""
WORDS = st.lists(st.from_regex(r"[a-z<&]{1,12}", fullmatch=True), min_size=1, max_size=6).map(" ".join)


def busy(**options: Any) -> tuple[rc.Cache, list[Any]]:
    """A cache that had to evict, and to repeat, and its values."""
    clock = ManualClock()
    cache = rc.Cache(100, clock=clock, **options)

    def step(value: Any, number: int) -> Any:
        clock.advance(1.0)
        return vector(*range(3))

    def step_of_new_size(value: Any, number: int) -> Any:
        return step(value, number)

    with cache:
        values = [rc.pure(vector(1, 2, 3))]
        for number in range(6):
            values.append(rc.ap(step_of_new_size if number == 3 else step, values[-1], number))
        values[1].get()
    return cache, values


def test_a_cache_prints_as_a_short_table() -> None:
    """Its settings, and what its statistics print: bytes, counters, overhead, what is repeated most."""
    cache, values = busy()
    stats = cache.stats()
    title, *lines = str(cache).splitlines()
    assert title == f"recompute.Cache: policy needed, search exact, release eager, {_form.name()} form"
    assert str(stats).splitlines() == ["recompute", *lines]
    shown = {line[:17].strip(): line[17:].strip() for line in lines}
    assert shown["used"] == "96 B of 100 B (24 B sources)"
    assert shown["peak"] == "120 B, overshoot 20 B"  # the size was not known before
    assert shown["operations"] == f"6, {stats.rematerializations} repeated"
    assert shown["evictions"] == str(stats.evictions)
    assert shown["functions"] == "6 s"
    assert shown["recomputation"] == f"{stats.rematerializations} s"
    assert shown["library"] == "about 0 s"  # by a clock that only functions advance
    assert shown["overhead"] == f"{stats.overhead:.2f}"
    assert lines[-1].split() == ["busy.step", str(stats.rematerializations), str(stats.rematerializations), "s"]
    assert len(lines) < 14
    assert values


def test_devices_are_listed_where_there_are_several() -> None:
    """A line each, with its budget."""
    stats = rc.Cache().stats()
    assert "device" not in str(stats)
    pools = [PoolStats(name, budget, 10, 2000, 0, 0, 0, 0, 0) for name, budget in (("cpu", None), ("gpu:0", 5000))]
    shown = str(dataclasses.replace(stats, pools=tuple(pools))).splitlines()
    assert [line.split() for line in shown[-3:]] == [
        ["device", "used", "budget", "peak"],
        ["cpu", "10", "B", "none", "2", "kB"],
        ["gpu:0", "10", "B", "5", "kB", "2", "kB"],
    ]
    assert dataclasses.replace(stats, pools=tuple(pools)).budget is None
    assert dataclasses.replace(stats, pools=tuple(pools[1:] * 2)).budget == 10_000


class Texts(HTMLParser):
    """The texts of a document, and a check that its tags are closed in order."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(document)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@given(
    title=TEXTS,
    pairs=st.lists(st.tuples(TEXTS, TEXTS), max_size=4),
    rows=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=4),
)
def test_html_has_the_texts_of_the_table(
    title: str, pairs: list[tuple[str, str]], rows: list[tuple[str, str, str]]
) -> None:
    """Whatever they contain: nothing of them becomes a tag."""
    table = Table(title, pairs, [List(["one", "two", "three"], rows, "<>>")])
    expected = [title, *(text for pair in pairs for text in pair), "one", "two", "three"]
    expected += [text for row in rows for text in row]
    assert Texts(table.html()).texts == [text for text in expected if text]


@given(
    columns=st.sampled_from([[], ["label", "some value"]]),
    rows=st.lists(st.tuples(WORDS, WORDS), max_size=5),
    width=st.integers(10, 80),
)
def test_narrow_lines_break_no_word(columns: list[str], rows: list[tuple[str, str]], width: int) -> None:
    """All words are there, in order and whole; no line is longer than the width unless it is one word or a label."""
    lines = fitted(columns, rows, "<<", width)
    words = [word for row in rows for text in row for word in text.split()]
    shown = [word for line in lines for word in line.split()]
    assert [word for word in shown if word in words] or not rows
    if not columns:
        assert sorted(shown) == sorted(words)
    labels = [*columns, *(row[0] for row in rows)]
    assert all(len(line) <= width or line.strip() in [*words, *labels] or len(line.split()) < 3 for line in lines)
    if all(len(line) <= width for line in aligned([columns, *rows] if columns else rows, "<<")):
        assert lines == aligned([columns, *rows] if columns else rows, "<<")


def test_what_notebooks_show() -> None:
    """A cache, its statistics and a value, which is not recomputed for that and says how it was made."""
    cache, values = busy()
    assert "policy needed" in Texts(cache._repr_html_()).texts[0]
    assert "overhead" in Texts(cache.stats()._repr_html_()).texts
    evicted = next(value for value in values if not value.resident)
    before = cache.stats().rematerializations
    texts = Texts(evicted._repr_html_()).texts
    assert repr(evicted) in texts
    assert any(text.startswith("busy.step, ") and "test_sight.py:" in text for text in texts)
    assert any(text.startswith("1 s, run ") for text in texts)
    assert "nothing: a source" in Texts(values[0]._repr_html_()).texts
    with cache:
        many = rc.ap(lambda *all: 1, *values[:1] * 7)
        assert any("and 2 more" in text for text in Texts(many._repr_html_()).texts)
        assert "plain arguments" in Texts(rc.ap(vector, 1)._repr_html_()).texts
    assert cache.stats().rematerializations == before
    assert not evicted.resident


@pytest.fixture
def debug(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Somebody wants to know."""
    caplog.set_level(logging.DEBUG, logger="recompute")
    return caplog


def test_the_log_has_evictions_and_repetitions(debug: pytest.LogCaptureFixture) -> None:
    """At the level DEBUG, one record each, with function, bytes and time; not those that a reference's end makes."""
    cache, values = busy()
    stats = cache.stats()
    messages = [record.getMessage() for record in debug.records if record.levelno == logging.DEBUG]
    assert {record.name for record in debug.records} == {"recompute"}
    made = rf"busy\.step \({re.escape(__file__)}:\d+\)"
    evicted, repeated = re.compile(rf"evicted {made}, storage "), re.compile(rf"repeated {made} in 1 s for 24 B")
    assert sum(evicted.match(message) is not None for message in messages) == stats.evictions > 0
    assert sum(repeated.fullmatch(message) is not None for message in messages) == stats.rematerializations > 0
    told = [record for record in debug.records if evicted.match(record.msg % record.args)]
    assert {record.pathname for record in told} == {__file__}  # the line of the program that wanted the room
    held = values[1].get()
    values[1].evict()
    assert "held by the program (request)" in debug.records[-1].getMessage()
    assert held
    count = len(debug.records)
    del values
    assert len(debug.records) == count


def test_the_log_has_the_form_once(debug: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which form of the library runs is said with the first cache that somebody wants to know about."""
    monkeypatch.setattr("recompute._logged._told", [])
    rc.Cache()
    rc.Cache()
    assert [record.getMessage() for record in debug.records] == [f"the form that runs is {_form.described()}"]


def test_nobody_listens_where_nobody_asks() -> None:
    """Without the level there is no listener, so that a cache is as fast as without `logging`."""
    cache, values = busy()
    assert cache._engine.journal.listeners == []
    assert values


def test_the_level_is_looked_up_when_a_cache_is_entered(caplog: pytest.LogCaptureFixture) -> None:
    """Not only when it is made; and a level that is raised ends it at the next event."""
    cache, values = busy()
    with caplog.at_level(logging.DEBUG, logger="recompute"), cache:
        values[2].evict()
        values[2].get()
        assert caplog.records
    before = len(caplog.records)
    values[2].evict()
    assert len(caplog.records) == before
    assert cache._engine.journal.listeners == []
    with caplog.at_level(logging.DEBUG, logger="recompute"), cache:
        values[2].get()
        assert len(caplog.records) == before + 1


def test_warnings_are_logged_too(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """At the level WARNING, beside the warning itself; without any handler nothing is printed by `logging`."""
    cache = rc.Cache()

    def bad(event: Event) -> None:
        raise RuntimeError("no")

    cache.subscribe(bad)
    with cache, pytest.warns(RuntimeWarning, match="will hear no more"):
        rc.pure(1)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("recompute", logging.WARNING)
    assert "will hear no more" in record.getMessage()
    caplog.handler.setLevel(logging.CRITICAL)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warn("100% of it", UserWarning)
    assert (str(shown[0].message), shown[0].filename) == ("100% of it", __file__)
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("recompute").handlers)
    assert capfd.readouterr().err == ""


@given(
    costs=st.lists(st.tuples(st.booleans(), st.floats(0, 10), st.sampled_from("fgh")), max_size=20),
    used=st.lists(st.integers(0, 100), max_size=60),
)
def test_what_has_happened_of_late(costs: list[tuple[bool, float, str]], used: list[int]) -> None:
    """Shares are between 0 and 1 and agree with the events; a picture has a sign for each drawing, to a limit."""
    recent = Recent()
    recent(Added(0.0, 8, 1, 8, "cpu"))
    recent(Evicted(0.0, 0, 1, 8, "pressure"))
    for again, cost, name in costs:
        recent(Performed(0.0, 0, name, cost, again, (), (), ()))
    assert recent.news
    whole = sum(cost for _, cost, _ in costs)
    repeated = sum(cost for again, cost, _ in costs if again)
    assert recent.share == pytest.approx(repeated / whole if whole else 0.0)
    for nbytes in used:
        recent.fade(nbytes)
        assert not recent.news
    assert len(recent.history(100)) == len(recent.repeated()) == min(len(used), 40)
    if used and whole:
        levels = " ▁▂▃▄▅▆▇█"
        assert levels.index(recent.repeated()[-1]) / 8 >= repeated / whole - 1e-9
    assert {name for name, _ in recent.functions()} <= {name for again, _, name in costs if again}
    if whole:
        assert recent.share == pytest.approx(repeated / whole)


def test_pictures_of_a_cache() -> None:
    """A line, and several lines; nothing before the first operation."""
    assert parts(rc.Cache().stats()) == []
    cache, values = busy()
    assert parts(cache.stats())[:2] == ["96 B of 100 B", "6 operations"]
    recent = Recent()
    recent(Performed(0.0, 0, "step", 1.0, True, (), (), ()))
    recent.fade(50)
    shown = str(picture(cache.stats(), recent))
    assert "96 B of 100 B, peak 120 B" in shown
    assert "▄" in shown
    assert "of late 100% of the computing is repeated" in shown
    assert shown.splitlines()[-1].split() == ["step", "100%"]
    assert values


def test_watching_where_nobody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    """No terminal and no notebook: nothing is written, and the end leaves no listener."""
    cache = rc.Cache()
    with cache, cache.watch() as view:
        rc.ap(vector, 1)
        assert len(cache._engine.journal.listeners) == 1
    assert cache._engine.journal.listeners == []
    view.stop()
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="every is in seconds"):
        cache.watch(every=0)


class Notebook:
    """What IPython shows in a kernel: the parts of it that are asked for. IPython itself is not installed here."""

    def __init__(self) -> None:
        self.cells: list[list[str]] = []

    def display(self, html: str, display_id: bool) -> Any:
        assert display_id
        cell = [html]
        self.cells.append(cell)
        return SimpleNamespace(update=cell.append)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    shown = Notebook()
    package, tools = ModuleType("IPython"), ModuleType("IPython.display")
    vars(package).update(get_ipython=lambda: SimpleNamespace(kernel=object()))
    vars(tools).update(HTML=lambda text: text, display=shown.display)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", tools)
    return shown


def test_watching_in_a_notebook(notebook: Notebook) -> None:
    """One output below the cell, drawn again while things happen; the last figures stay."""
    cache = rc.Cache("1 MB")
    view = cache.watch(every=0.001)
    with cache:
        value = rc.ap(vector, 1, 2)
    view.stop()
    view.stop()
    (cell,) = notebook.cells
    assert "16 B of 1 MB" in Texts(cell[-1]).texts[2]
    count = len(cell)
    with cache:
        rc.ap(vector, 1)
    assert len(cell) == count
    assert value.resident


WATCHED = """
import sys
{before}
import recompute as rc
cache = rc.Cache("1 MB")
with cache, cache.watch(every=0.01):
    rc.ap(str, 5)
    print("mine")
    view = cache.watch()
    while cache.stats().operations < 2:
        rc.ap(str, 6)
print("stopped")
"""


@pytest.mark.parametrize("rich", [True, False])
def test_watching_in_a_terminal(rich: bool) -> None:
    """A panel with rich, a line without; what the program prints stays whole, and the screen is free afterwards."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    if rich:
        pytest.importorskip("rich", reason="the panel is one of rich's")
    before = "" if rich else "sys.modules['rich.console'] = None"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    terminal, ours = pty.openpty()
    command = [sys.executable, "-c", WATCHED.format(before=before)]
    process = subprocess.Popen(command, env=environment, stdin=ours, stdout=ours, stderr=ours)
    os.close(ours)
    pieces = []
    with suppress(OSError):  # Linux: the other side has closed
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    os.close(terminal)
    shown = b"".join(pieces).decode()
    assert process.wait() == 0, shown
    assert "Traceback" not in shown
    assert "mine" in shown
    assert "stopped" in shown
    if rich:
        assert "memory" in shown.partition("stopped")[0]
        assert "of 1 MB" in shown


def test_watching_does_not_keep_the_cache(notebook: Notebook) -> None:
    """A view of a cache that has gone ends without an error."""
    cache = rc.Cache()
    view = cache.watch()
    listeners = cache._engine.journal.listeners
    del cache, listeners
    gc.collect()
    view.stop()
    assert len(notebook.cells) == 1


def test_durations() -> None:
    """In a unit that suits them."""
    assert [seconds(time) for time in (0.0125, 1.5, 125)] == ["12.5 ms", "1.5 s", "2 min 5 s"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), st.integers(300, 1000))
def test_the_memory_by_function_is_all_that_is_used(steps: list[tuple[int, bool]], budget: int) -> None:
    """Whatever was evicted or is held outside, the bytes of all functions and sources are those that are counted."""
    clock = ManualClock()

    def make(number: int) -> Any:
        clock.advance(1.0)
        return vector(*range(number))

    with rc.Cache(budget, clock=clock) as cache:
        values = [rc.pure(vector(1))]
        held = []
        for number, evict in steps:
            values.append(rc.ap(make, number))
            if number == 2:
                held.append(values[-1].get())
            if evict:
                values[-1].evict()
        found = cache.memory()
        assert sum(one.nbytes for one in found) == cache.stats().used
        made = [one for one in found if one.function.endswith(".make")]
        assert all(one.place.startswith(f"{__file__}:") for one in made)
        assert found[0].nbytes == max(one.nbytes for one in found)
        assert str(found).splitlines()[1].split() == ["in", "memory", *format_bytes(cache.stats().used).split()]


def test_the_time_of_the_library_is_measured_apart_from_that_of_functions() -> None:
    """A clock that functions advance sees none; one that advances whenever it is read sees some, and a hint says so."""
    ticks = itertools.count()
    with rc.Cache(clock=lambda: next(ticks) * 1e-6) as cache:
        for number in range(2000):
            rc.ap(int, number)
    stats = cache.stats()
    assert stats.model_time == pytest.approx(2000e-6)
    assert 2000e-6 <= stats.library_time <= 3 * 2 * 2000e-6
    assert "make operations larger" in str(stats)
    still, _ = busy()
    assert still.stats().library_time == 0.0
    assert "hint" not in str(still)


def test_what_a_nested_operation_takes_is_not_the_time_of_the_library() -> None:
    """Functions that call the cache themselves are billed as ever."""
    clock = ManualClock()

    def inner() -> int:
        clock.advance(1.0)
        return 1

    def outer() -> int:
        clock.advance(1.0)
        return int(rc.ap(inner).get()) + 1

    with rc.Cache(clock=clock) as cache:
        rc.ap(outer).get()
    assert (cache.stats().model_time, cache.stats().library_time) == (2.0, 0.0)
