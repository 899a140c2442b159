"""`report`: a study of a recorded run under many budgets, as a page, a picture or figures."""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recompute._budget import format_bytes
from recompute._sight.curve import document
from recompute._sight.page import MOST, page
from recompute._sight.perfetto import perfetto
from recompute._sight.recording import RecordedRun, open_recording
from recompute._sight.study import BUDGETS, Mark, Progress, Study, by_device, exact, study
from recompute._traces.program import Program
from recompute.events import Performed

if TYPE_CHECKING:
    from recompute._cache import Cache

PASTE: Final = 'rc.Cache("{budget}")'
"""The line to paste, where the trace has none of the library that recorded it."""
_PACKED: Final = 700_000
"""Bytes of the trace in a page, as text."""


class Report:
    """The cost of each budget for a recorded run: `save` it, or let a notebook show it."""

    def __init__(self, study: Study, recording: RecordedRun | None) -> None:
        self.study = study
        self._recording = recording

    @property
    def program(self) -> Program:
        """The recorded program."""
        return self.study.subject.program

    @property
    def today(self) -> Mark | None:
        """The recorded run itself; None for a trace in which there is none."""
        return None if self._recording is None else _today(self._recording, self.study.subject.whole)

    def html(self) -> str:
        """The page: one document, which loads nothing from elsewhere. At most 2 MB."""
        trace, note = ("", "") if self._recording is None else packed(self._recording)
        text = self._page(trace, note)
        if trace and len(text.encode()) > MOST:
            text = self._page("", "The trace is left out, to keep the page small; recompute export writes it.")
        return text

    def _page(self, trace: str, note: str) -> str:
        shown = len(self.study.subject.shown)
        others = len(self.study.subject.places) - shown
        notes = (
            [f"{others:,} smaller values are in the bytes in use, and have no rows of their own."] if others > 0 else []
        )
        return page(self.study, self.today, self.paste, trace, [*notes, *([note] if note else [])])

    def svg(self) -> str:
        """The picture of overhead against budget alone."""
        return document(self.study, self.today)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page (.html) or the picture of the curve (.svg). Returns the absolute path. Raises OSError."""
        target = Path(path).absolute()
        if target.suffix.lower() not in (".html", ".htm", ".svg"):
            raise ValueError(f"a report is .html, or .svg for only the curve, not {target.name!r}")
        target.write_text(self.svg() if target.suffix.lower() == ".svg" else self.html(), encoding="utf-8")
        return target

    def paste(self, budget: int) -> str:
        """The line that gives the program a budget, in the form of the library that recorded it."""
        form = self.program.settings.get("paste")
        given = by_device(self.study.subject, budget)
        text = (
            f'"{exact(budget)}"' if len(given) == 1 else repr({device: exact(size) for device, size in given.items()})
        )
        line = form if isinstance(form, str) and "{budget}" in form else PASTE
        return line.replace('"{budget}"', text).replace("{budget}", exact(budget))

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON: bytes and seconds."""
        study = self.study
        return {
            "trace": self.program.name,
            "peak_bytes": study.subject.whole,
            "model_time": self.program.model_time * self.program.unit,
            "complete": study.complete,
            "floor_bytes": round(study.floor.operation * study.subject.whole),
            "today": None if self.today is None else asdict(self.today),
            "budgets": [
                {
                    "budget_bytes": look.budget,
                    "budget_ratio": look.share,
                    "status": look.status,
                    "overhead": look.overhead,
                    "seconds": look.seconds,
                    "peak_bytes": look.peak,
                    "evictions": look.evictions,
                    "rematerializations": look.rematerializations,
                    "paste": self.paste(look.budget),
                }
                for look in study.looks
            ],
            "holes": [asdict(hole) for hole in study.holes],
            "tier": [asdict(mark) for mark in study.curve_with_tier],
            "planned": [asdict(mark) for mark in study.planned],
            "segments": None if study.segments is None else asdict(study.segments),
            "notes": list(study.notes),
        }

    def _repr_html_(self) -> str:
        """For a notebook: the page in a frame that can do nothing outside of itself."""
        return (
            '<iframe sandbox="allow-scripts allow-popups allow-popups-to-escape-sandbox allow-downloads" '
            'title="What would a budget cost?" style="width:100%;height:900px;border:0" '
            f'srcdoc="{escape(self.html())}"></iframe>'
        )

    def __repr__(self) -> str:
        study = self.study
        works = [look for look in study.looks if look.overhead is not None]
        told = f"{len(works)} of {len(study.looks)} budgets work"
        if works:
            told += f", from {format_bytes(works[0].budget)} (overhead {works[0].overhead:.2f})"
        return f"<Report {self.program.name}: {told}>"


def report(
    run: Cache | Program | str | os.PathLike[str],
    *,
    seconds: float = 60.0,
    tier: str | None = None,
    budgets: int = BUDGETS,
    processes: int = 1,
    progress: Progress = lambda done, of, what: None,
    so_far: Callable[[Report], None] = lambda report: None,
) -> Report:
    """What would a budget cost? A recorded run, replayed and planned under many.

    Parameters
    ----------
    run
        A cache that records (`Cache(trace=...)`), the path of a trace, or a program that was read from one.
    seconds, tier, budgets, processes, progress
        For plans, all together; where evicted bytes may go; how many budgets; replays at a time (more than one needs
        `if __name__ == "__main__":`); told how many of how many steps are done, and what comes next.
    so_far
        Given the report before it begins: if an exception ends the work, it has what was ready.

    Each replay takes tens of microseconds for each step of the program, and no memory for its values. Raises ValueError
    for a cache that does not record, TraceError and OSError for a file that is no trace.
    """
    recording: RecordedRun | None = None
    if isinstance(run, Program):
        program = run
    else:
        recording = open_recording(Path(_path(run)))
        program = recording.program
    kept = None if recording is None or recording.replayed else recording
    made: list[Report] = []

    def begin(begun: Study) -> None:
        made.append(Report(begun, kept))
        so_far(made[0])

    study(
        program,
        budgets=budgets,
        seconds=seconds,
        tier=tier,
        processes=processes,
        progress=progress,
        so_far=begin,
    )
    return made[0]


def _path(run: Any) -> str | os.PathLike[str]:
    """Where the trace of a run is, complete up to now."""
    if isinstance(run, str | os.PathLike):
        return run
    trace = getattr(run, "trace", run)
    if trace is run:
        raise TypeError(f"report takes a cache, a program or the path of a trace, not {run!r}")
    if trace is None:
        raise ValueError(
            "this cache records nothing, so there is nothing to report; make it with Cache(..., trace='run.jsonl.gz')"
        )
    run.flush()
    return trace  # type: ignore[no-any-return]  # of a cache


def _today(recording: RecordedRun, whole: int) -> Mark | None:
    """The recorded run as a point: what it was allowed, or else what it took."""
    first = again = 0.0
    used: dict[str, int] = {}
    for event in recording.events:
        if isinstance(event, Performed):
            first, again = (first, again + event.cost) if event.again else (first + event.cost, again)
    devices = recording.devices
    for event in recording.events:
        device = getattr(event, "device", None) or devices.get(getattr(event, "storage", -1), "cpu")
        used[device] = max(used.get(device, 0), event.used)
    if not first:
        return None
    budget = sum(used.values()) if recording.budget is None else recording.budget
    return Mark(budget, budget / max(1, whole), 1 + again / first)


def packed(recording: RecordedRun) -> tuple[str, str]:
    """The run for Perfetto, gzip in base64, and what is to be said: of a long run the longest slices alone."""
    head, *lines = "".join(perfetto(recording)).splitlines()
    head, _, first = head.partition("[")
    lines = [line.removesuffix("]}").rstrip(",") for line in (first, *lines)]
    durations = sorted([_duration(line) for line in lines if _is(line, "X")], reverse=True)
    kept, share = lines, 1.0
    while True:
        data = gzip.compress((head + "[" + ",\n".join(filter(None, kept)) + "]}\n").encode(), 6, mtime=0)
        text = base64.b64encode(data).decode()
        if len(text) <= _PACKED or share < 1e-6:
            break
        share *= min(0.8, 0.9 * _PACKED / len(text))
        kept = _longest(lines, durations[int(share * len(durations))], round(1 / share))
    if kept is lines:
        return text, ""
    count = sum(_is(line, "X") for line in kept)
    return text, (
        f"The trace for Perfetto has the longest {count:,} of {len(durations):,} slices, to keep the page small; "
        "recompute export writes all of them."
    )


def _longest(lines: list[str], least: float, every: int) -> list[str]:
    """The slices that are longer than `least`, each so many'th value of the counters, and what names the tracks."""
    kept: list[str] = []
    counters = 0
    for line in lines:
        if _is(line, "C"):
            counters += 1
            if counters % every == 0:
                kept.append(line)
        elif _is(line, "M") or (_is(line, "X") and _duration(line) > least):
            kept.append(line)
    return kept


def _is(line: str, kind: str) -> bool:
    return line.startswith(f'{{"ph":"{kind}"')


def _duration(line: str) -> float:
    return float(line.partition('"dur":')[2].partition(",")[0])
