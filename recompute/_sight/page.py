"""The page: one HTML file with everything in it.

The text is put together here, from a study, a style (`page.css`) and a script (`page.js`) beside this file. A
library of templates would be one more dependency, for a page of which most is data; and a library that draws in the
browser would be larger than the page may be, for two pictures of rectangles and lines. So the first picture is SVG
made in Python (`curve`), which is there without a script, too, and the second, which the slider turns, is SVG made by
150 lines of JavaScript.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any, Final

from recompute._budget import format_bytes
from recompute._sight.curve import DRAWING, STYLE, curve, described
from recompute._sight.look import STEPS
from recompute._sight.study import Mark, Study, exact
from recompute.text import seconds

MOST: Final = 2_000_000
"""Bytes of a page."""

_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The content security policy of the page: nothing is loaded from anywhere."""

_HINT: Final = (
    "Point at a row, or move into the picture with Tab and through its rows with the arrow keys, to see which value it "
    "is."
)


def page(study: Study, today: Mark | None, paste: Any, trace: str, notes: Sequence[str] = ()) -> str:
    """The document. `paste(budget)`: the line to paste. `trace`: that of the recorded run, gzip in base64, or empty."""
    program = study.subject.program
    style = STYLE + DRAWING + _read("page.css")
    body = "".join(
        [*_head(study), *_first(study, today), *_second(study, paste, today), *_third(), *_last(study, trace, notes)]
    )
    script = _read("page.js")
    data = json.dumps(_inlined(study, paste), separators=(",", ":")).replace("<", "\\u003c")
    packed = f'<script type="application/gzip" id="trace">{trace}</script>' if trace else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        f"<title>What would a budget cost? {escape(program.name)}</title><style>{style}</style></head><body>{body}"
        f'<script type="application/json" id="data">{data}</script>{packed}<script>{script}</script></body></html>\n'
    )


def _read(name: str) -> str:
    return (files("recompute._sight") / name).read_text(encoding="utf-8")


def _head(study: Study) -> Iterable[str]:
    program = study.subject.program
    peak = format_bytes(study.subject.whole)
    compute = seconds(program.model_time * program.unit)
    recorded = str(program.settings.get("time", ""))[:10]
    yield "<header><h1>What would a budget cost?</h1>"
    yield (
        f'<p class="soft">{escape(program.name)}: {len(program.calls):,} operations, {peak} at the peak, {compute} of '
        f"compute without a budget{f', recorded on {escape(recorded)}' if recorded else ''}. Each budget was replayed "
        "through the cache itself, with a virtual clock.</p>"
    )
    if not study.complete:
        ready = f"{len(study.looks)} of {len(study.budgets)} budgets are here"
        yield f"<p><strong>This was interrupted: {ready}.</strong></p>"
    yield "</header><main>"


def _first(study: Study, today: Mark | None) -> Iterable[str]:
    yield '<section><h2>Overhead against budget</h2><figure><div class="wide-only">'
    yield curve(study, today, 960)
    yield '</div><div class="narrow">'
    yield curve(study, today, 366)
    yield f"</div><figcaption>{escape(described(study))} Between the points nothing is known.</figcaption></figure>"
    yield '<details><summary>The same as a table</summary><div class="wide">'
    yield _table(study, today)
    yield "</div></details></section>"


def _table(study: Study, today: Mark | None) -> str:
    """All points of the picture."""
    named: list[tuple[str, Mark]] = [("as recompute decides", mark) for mark in study.curve]
    named += [(f"with a tier of {study.tier}", mark) for mark in study.curve_with_tier]
    named += [("planned ahead", mark) for mark in study.planned]
    named += [("checkpoint by segments", mark) for mark in (study.segments,) if mark is not None]
    named += [("the recorded run", mark) for mark in (today,) if mark is not None]
    model = study.subject.program.model_time * study.subject.program.unit
    words = {"oom": "does not fit", "thrash": "takes too long"}
    rows = []
    for name, mark in named:
        cost = words.get(mark.why, mark.why) if mark.overhead is None else f"{mark.overhead:.3f}"
        time = "" if mark.overhead is None else seconds(model * mark.overhead)
        cells = (format_bytes(mark.budget), f"{mark.share:.1%}", cost, time)
        rows.append(
            f"<tr><td>{escape(name)}</td>" + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells) + "</tr>"
        )
    heads = "".join(
        f'<th class="n" scope="col">{head}</th>' for head in ("budget", "of the peak", "overhead", "compute")
    )
    return f'<table><thead><tr><th scope="col">how</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _second(study: Study, paste: Any, today: Mark | None) -> Iterable[str]:
    start = first_shown(study, today)
    ends = exact(study.looks[0].budget), exact(study.looks[-1].budget)
    yield '<section><h2>Within a budget</h2><div class="screen"><label for="budget">Budget</label>'
    yield (
        f'<input type="range" id="budget" min="0" max="{len(study.looks) - 1}" step="1" value="{start}" '
        f'aria-describedby="summary" autocomplete="off"><div class="ends" aria-hidden="true"><span>{ends[0]}</span>'
        f'<span>{ends[1]}</span></div></div><output for="budget" id="summary"></output>'
    )
    yield '<p>To run your program within it:</p><code class="line" id="paste" tabindex="0">'
    yield f"{escape(paste(study.looks[start].budget))}</code>"
    yield (
        '<figure><div id="picture" tabindex="0" role="group" aria-label="Values in memory over time" '
        f'aria-describedby="told"></div>'
        f'<p id="told" class="told" role="status">{_HINT}</p>'
        '<figcaption><span class="key" style="background:var(--first)"></span>in memory'
        '<span class="key" style="background:var(--again)"></span>recomputed'
        '<span class="key" style="background:var(--tier)"></span>fetched from a tier. Above, the bytes in use and the '
        "budget (dashed); in the strip below them, how much of the time went into recomputation; then a row for each "
        f'of the {len(study.subject.shown)} largest values, in order of creation. <span id="left"></span></figcaption>'
        "</figure><noscript><p>The picture of one budget needs JavaScript; the figures above do not.</p></noscript>"
        "</section>"
    )


def first_shown(study: Study, today: Mark | None) -> int:
    """The budget that the page opens at: near that of the recorded run if it had a smaller one, else near half."""
    wanted = today.share if today is not None and today.share < 0.97 else 0.5
    works = [at for at, look in enumerate(study.looks) if look.overhead is not None] or [0]
    return min(works, key=lambda at: abs(study.looks[at].share - wanted))


def _third() -> Iterable[str]:
    yield '<section class="two">'
    for title, name, heads in (
        ("Most memory at the peak", "held", ("made by", "bytes", "values")),
        ("Most recomputed", "repeated", ("function", "time", "times")),
    ):
        first, *others = heads
        cells = f'<th scope="col">{first}</th>' + "".join(f'<th class="n" scope="col">{head}</th>' for head in others)
        yield f'<div><h2>{title}</h2><div class="wide"><table><thead><tr>{cells}</tr></thead>'
        yield f'<tbody id="{name}"></tbody></table></div></div>'
    yield "</section>"


def _last(study: Study, trace: str, notes: Sequence[str]) -> Iterable[str]:
    if trace:
        yield (
            '<section class="screen"><h2>The recorded run</h2><p><button type="button" id="perfetto">Open in Perfetto'
            '</button> <a class="button" id="download" href="#download" download="trace.json.gz">Download the trace</a>'
            '</p><p class="soft">The page hands the trace over to the window of ui.perfetto.dev that it opens; nothing '
            'is uploaded. <span id="opened" role="status"></span></p></section>'
        )
    yield "</main><footer>"
    for note in (*study.notes, *notes):
        yield f'<p class="soft">{escape(note)}</p>'
    yield "</footer>"


def _inlined(study: Study, paste: Any) -> dict[str, Any]:
    subject = study.subject
    values = [[*subject.places[storage], subject.program.sizes[storage]] for storage in subject.shown]
    return {
        "name": subject.program.name,
        "whole": subject.whole,
        "limit": study.limit,
        "steps": STEPS,
        "hint": _HINT,
        "values": values,
        "looks": [{**asdict(look), "paste": paste(look.budget)} for look in study.looks],
    }
