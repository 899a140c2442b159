"""The page of a report, in a real browser and as a file."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser
from watched_programs import record

import recompute as rc
from recompute._cli import main
from recompute._sight import report as reports
from recompute._sight.report import Report
from recompute._traces.chain import chain
from recompute.testing import ManualClock

UNET = str(Path(__file__).parents[1] / "simulator" / "data" / "unet.jsonl.gz")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def training(path: Path, steps: int = 12) -> Path:
    """A recorded program there and back, within about half of its memory."""
    clock = ManualClock()
    done = iter(range(10**9))

    def forward(x: Any) -> bytes:
        clock.advance(0.010 + next(done) % 97 / 1e4)
        return b""

    def backward(gradient: Any, x: Any) -> bytes:
        clock.advance(0.020 + next(done) % 97 / 1e4)
        return b""

    with rc.Cache("8 kB", clock=clock, trace=path):
        states = [rc.pure(b"")]
        for _ in range(steps):
            states.append(rc.ap(forward, states[-1], nbytes=1000))
        gradient = states.pop()
        while states:
            gradient = rc.ap(backward, gradient, states.pop(), nbytes=1000)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """A report and its page."""
    folder = tmp_path_factory.mktemp("page")
    result = rc.report(training(folder / "run <b>.jsonl"), seconds=0.2, budgets=6)
    return result, result.save(folder / "report.html")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_without_errors_or_requests(
    window: Browser, made: tuple[Report, Path], width: int, dark: bool
) -> None:
    """From the disk, at both widths, light and dark: no word on the console, nothing else loaded, nothing too wide."""
    _, path = made
    window.requests()
    window.open(path, width, dark=dark)
    assert window.said() == []
    assert window.requests() == [path.as_uri()]
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    wide = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scroll, client = window.run(wide)
    assert scroll <= client == width
    shown = "return [...document.querySelectorAll('svg.curve')].filter(one => one.getBoundingClientRect().width).length"
    assert window.run(shown) == 1
    assert window.run("return document.querySelector('h1').textContent") == "What would a budget cost?"
    assert "run <b>.jsonl" in window.run("return document.body.innerText")


CONTRAST = """
const back = getComputedStyle(document.body).backgroundColor;
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const ratio = (colour) => {
  const [a, b] = [light(colour), light(back)].sort((x, y) => y - x);
  return (a + .05) / (b + .05);
};
const result = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.getClientRects().length || ["SCRIPT", "STYLE", "title", "desc"].includes(node.tagName)) continue;
  const style = getComputedStyle(node);
  const colour = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
  result.push([node.textContent.trim().slice(0, 30), ratio(colour)]);
}
for (const kind of ["policy", "segments", "today", "floor", "edge"])
  for (const node of document.querySelectorAll(`svg .${kind}`))
    result.push([kind, 1.5 * ratio(getComputedStyle(node).stroke)]);
return result;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(window: Browser, made: tuple[Report, Path], dark: bool) -> None:
    """Text has a contrast of 4.5 with the background at least, lines of 3: WCAG 2.2, 1.4.3 and 1.4.11."""
    window.open(made[1], dark=dark)
    result = window.run(CONTRAST)
    assert len(result) > 40
    assert [one for one in result if one[1] < 4.5] == []


def test_the_slider_turns_the_picture(window: Browser, made: tuple[Report, Path]) -> None:
    """By the keyboard: the picture, the line to paste, the tables and the mark on the curve are of the new budget."""
    report, path = made
    window.open(path)
    read = (
        "return [document.getElementById('picture').innerHTML, document.getElementById('paste').textContent, "
        "document.getElementById('summary').textContent, document.querySelector('.cursor').getAttribute('x1'), "
        "document.getElementById('repeated').textContent, document.getElementById('budget').value]"
    )
    window.run("document.getElementById('budget').focus()")
    window.press("End")
    last = window.run(read)
    window.press("Left", "Left")
    before = window.run(read)
    assert int(last[5]) == len(report.study.looks) - 1
    assert int(before[5]) == int(last[5]) - 2
    assert all(one != other for one, other in zip(last, before, strict=True))
    assert last[1] == report.paste(report.study.looks[-1].budget)
    assert "overhead 1.000" in last[2]
    assert "nothing" in last[4]
    look = report.study.looks[int(before[5])]
    assert f"{look.rematerializations} recomputations" in before[2]
    assert all(function in before[4] for function, *_ in look.repeated)
    assert window.run("return document.getElementById('budget').getAttribute('aria-valuetext')") == before[2]
    assert window.said() == []


def test_rows_are_named_by_mouse_and_by_keyboard(window: Browser, made: tuple[Report, Path]) -> None:
    """A value says its function, its size and its line; from the keyboard the rows are one stop with arrows."""
    _, path = made
    window.open(path)
    told = "return document.getElementById('told').textContent"
    window.run("document.getElementById('paste').focus()")
    window.press("Tab")
    assert window.run("return document.activeElement.id") == "picture"
    first = window.run(told)
    assert first.startswith("Value 1 of ")
    assert re.search(r"training\.forward, 1\.00 kB, .*test_page\.py:\d+: computed once", first)
    window.press("Down", "Down")
    assert window.run(told).startswith("Value 3 of ")
    window.press("End")
    assert window.run(told).startswith("Value 24 of 24")
    box = (
        "const box = document.querySelectorAll('.band')[1]; box.scrollIntoView({block: 'center'});"
        "const where = box.getBoundingClientRect(); return [where.x + 80, where.y + where.height / 2]"
    )
    window.point(*window.run(box))
    assert window.run(told).startswith("Value 2 of ")
    assert window.run("return document.querySelectorAll('.band.on').length") == 1


def test_each_stop_of_the_keyboard_can_be_seen(window: Browser, made: tuple[Report, Path]) -> None:
    """Tab comes to all that can be used, in order, and there is an outline around it."""
    _, path = made
    window.open(path)
    seen = []
    for _ in range(6):
        window.press("Tab")
        seen.append(window.run("return document.activeElement.id || document.activeElement.tagName"))
        style = "const style = getComputedStyle(document.activeElement); return style.outlineStyle"
        assert window.run(style) != "none"
    assert seen == ["SUMMARY", "budget", "paste", "picture", "perfetto", "download"]


def test_it_can_be_read_without_a_script(window: Browser, made: tuple[Report, Path]) -> None:
    """The curve and its table are there; what needs JavaScript says so."""
    window.open(made[1], script=False)
    assert window.devtools("Runtime.evaluate", expression="1")  # the page is there
    text = made[1].read_text()
    assert "needs JavaScript" in text
    assert text.count("<svg") == 2
    assert "as recompute decides" in text
    window.open(made[1])


def test_it_can_be_printed(window: Browser, made: tuple[Report, Path]) -> None:
    """On paper the slider and the buttons are gone, and it is not blank."""
    window.open(made[1])
    window.devtools("Emulation.setEmulatedMedia", media="print")
    hidden = "return [...document.querySelectorAll('.screen')].every((node) => !node.getClientRects().length)"
    assert window.run(hidden)
    printed = b64decode(window.devtools("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000


def test_a_notebook_shows_the_page_in_a_frame(window: Browser, made: tuple[Report, Path], tmp_path: Path) -> None:
    """Which can do nothing outside of itself, and works."""
    report, _ = made
    cell = report._repr_html_()
    assert 'sandbox="allow-scripts' in cell
    assert "allow-same-origin" not in cell
    assert unescape(re.search('srcdoc="(.*)"', cell, re.DOTALL)[1]) == report.html()  # type: ignore[index]
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><link rel=icon href='data:,'>{cell}")
    window.open(path)
    assert window.said() == []


def test_the_trace_in_the_page_is_that_of_the_run(made: tuple[Report, Path]) -> None:
    """What is handed to Perfetto has a slice for each run of an operation."""
    _, path = made
    (trace,) = re.findall(r'<script type="application/gzip" id="trace">(.*?)</script>', path.read_text())
    lines = json.loads(gzip.decompress(b64decode(trace)))["traceEvents"]
    assert sum(line.get("cat") == "operation" for line in lines) == 24
    assert sum(line.get("cat") == "recomputation" for line in lines) > 0


def test_a_long_run_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest slices stay, it is still a trace, and the page says what is left out."""
    path = training(tmp_path / "run.jsonl", 200)
    monkeypatch.setattr(reports, "_PACKED", 4_000)
    trace, note = reports.packed(reports.open_recording(path))
    assert len(trace) <= 4_000
    lines = json.loads(gzip.decompress(b64decode(trace)))["traceEvents"]
    kept = [line for line in lines if line["ph"] == "X"]
    assert kept
    assert f"the longest {len(kept):,} of " in note
    monkeypatch.undo()
    whole, nothing = reports.packed(reports.open_recording(path))
    assert nothing == ""
    durations = sorted(
        line["dur"] for line in json.loads(gzip.decompress(b64decode(whole)))["traceEvents"] if "dur" in line
    )
    assert sorted(line["dur"] for line in kept) == durations[-len(kept) :]


def test_a_page_never_becomes_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of what a page can have is within two megabytes: as many budgets, stays and slices as there may be."""
    result = rc.report(training(tmp_path / "run.jsonl", 80), seconds=0, budgets=50)
    assert len(result.study.looks) == 50
    most = max(len(row) for look in result.study.looks for row in look.rows)
    assert most
    full = [[[9999, 9999, 1] * 37] * 40] * 50  # the stays that a page may have, each as long as one can be written
    assert len(result.html()) + len(json.dumps(full, separators=(",", ":"))) < 2_000_000
    monkeypatch.setattr(reports, "MOST", len(result.html()) - 1)
    text = result.html()
    assert 'id="trace"' not in text
    assert "The trace is left out" in text


def test_a_report_of_a_cache(tmp_path: Path) -> None:
    """Of one that records; another is an error that names what is missing."""
    with rc.Cache("1 MB", trace=tmp_path / "run.jsonl") as cache:
        values = [rc.ap(bytes, number) for number in range(5)]
        result = rc.report(cache, seconds=0, budgets=2)
    assert result.program.calls
    assert result.today is not None
    assert result.today.overhead == 1.0
    assert result.today.budget == 1_000_000
    assert repr(result).startswith("<Report run.jsonl: ")
    assert len(values) == 5
    for wrong in (3, None, b"run.jsonl"):
        with pytest.raises(TypeError, match="takes a cache, a program or the path of a trace"):
            rc.report(wrong)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match=r"records nothing.*Cache\(\.\.\., trace='run\.jsonl\.gz'\)"):
        rc.report(rc.Cache())
    with pytest.raises(ValueError, match=r"is \.html, or \.svg"):
        result.save(tmp_path / "report.pdf")


def test_the_line_to_paste_is_in_the_form_of_who_recorded(tmp_path: Path) -> None:
    """A trace says it; one that does not is the library's own. On several devices it is a mapping."""
    program = chain(4)
    result = rc.report(program, seconds=0, budgets=2)
    assert result.paste(512_000_000) == 'rc.Cache("512MB")'
    program.settings["paste"] = 'rt.budget("{budget}")'
    assert result.paste(14_200_000_000) == 'rt.budget("14.2GB")'
    program.settings["paste"] = 'remat(f, budget="{budget}")'
    assert result.paste(3_000) == 'remat(f, budget="3kB")'
    program.settings["paste"] = 7
    result.study.subject.peak = {"cpu": 100, "cuda:0": 300}
    assert result.paste(1000) == "rc.Cache({'cpu': '250B', 'cuda:0': '750B'})"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page, or the curve alone; figures as JSON."""
    path = training(tmp_path / "run.jsonl")
    page, curve = tmp_path / "page.html", tmp_path / "curve.SVG"
    few = ["--seconds", "0", "--budgets", "3"]
    assert main(["report", str(path), "-o", str(page), *few, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["output"] == str(page)
    assert [one["budget_bytes"] for one in figures["budgets"]] == sorted(
        one["budget_bytes"] for one in figures["budgets"]
    )
    assert figures["today"]["overhead"] > 1
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", str(path), "-o", str(curve), *few]) == 0
    assert capsys.readouterr().out.strip() == str(curve)
    assert curve.read_text().startswith("<?xml")
    assert "http" not in curve.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file"),
        ([UNET, "-o", "report.pdf"], "must be .html, or .svg for only the curve"),
        ([UNET, "-o", "no/such/folder/a.html"], "there is no directory"),
        ([UNET, "--seconds", "soon"], "--seconds is a number"),
        ([UNET, "--budgets", "1"], "--budgets must be at least 2"),
        ([UNET, "--tier", "fast"], "--tier: "),
        ([__file__], "not JSON"),
    ],
)
def test_errors_of_the_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, before the work."""
    assert main(["report", *arguments]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1


def test_an_interrupt_leaves_what_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has the budgets that were done and says so; the status is that of an interrupt."""
    page = tmp_path / "page.html"
    look_at = reports.study.__globals__["look_at"]
    seen: list[int] = []

    def stop(*arguments: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) > 2:
            raise KeyboardInterrupt
        return look_at(*arguments, **options)

    monkeypatch.setattr("recompute._sight.study.look_at", stop)
    assert main(["report", str(training(tmp_path / "run.jsonl")), "-o", str(page), "--processes", "1"]) == 130
    assert "interrupted: 2 of 20 budgets are in" in capsys.readouterr().err
    assert "This was interrupted: 2 of 20 budgets are here." in page.read_text()


def test_a_published_trace_has_no_run_of_its_own(tmp_path: Path) -> None:
    """So there is no point of the recorded run, and no trace to open."""
    result = rc.report(chain(4), seconds=0, budgets=2)
    assert result.today is None
    assert 'id="trace"' not in result.html()
    assert record([("call", 10, 0)], tmp_path / "run.jsonl").used > 0
