"""The picture of overhead against budget, as SVG written by hand.

It is a dozen kinds of shapes; a plotting library that draws in the browser would be a hundred times as long as what is
needed of it, and Matplotlib, which draws the pictures of `recompute plot`, is an extra that a report does not require,
and cannot follow the reader's colours. Colours are CSS variables, from the page or from the file's own style.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from recompute._budget import format_bytes
from recompute._sight.study import Mark, Study
from recompute.text import seconds

STYLE: Final = """
:root{--back:#fff;--ink:#1f2328;--soft:#57606a;--line:#d0d7de;--first:#0072b2;--again:#b34700;--plan:#1f2328;
--tier:#00735c;--bad:#8c959f;--shade:#e6e8eb;--today:#8a2a72}
@media(prefers-color-scheme:dark){:root{--back:#14171c;--ink:#e6e9ee;--soft:#a8b1bd;--line:#3a424d;--first:#63b8ee;
--again:#ff9e5e;--plan:#e6e9ee;--tier:#4fd1ae;--bad:#7d8794;--shade:#2a303a;--today:#ee97d5}}
"""
"""Colours, from Okabe and Ito's palette, darker or lighter until text in them can be read on the background."""

DRAWING: Final = """
.chart text{fill:var(--soft);font:12px system-ui,sans-serif}.chart .strong{fill:var(--ink)}
.chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--soft)}
.chart .policy{fill:none;stroke:var(--first);stroke-width:2.5}.chart .policy-dot{fill:var(--first)}
.chart .tier{fill:none;stroke:var(--tier);stroke-width:2;stroke-dasharray:7 4}.chart .tier-dot{fill:var(--tier)}
.chart .plan{fill:none;stroke:var(--plan);stroke-width:1.5;stroke-dasharray:2 4}.chart .plan-dot{fill:var(--plan)}
.chart .segments{fill:var(--back);stroke:var(--again);stroke-width:2.5}
.chart .today{fill:var(--back);stroke:var(--today);stroke-width:3}
.chart .hole{fill:var(--shade)}.chart .hatch{stroke:var(--bad);stroke-width:1;opacity:.55}
.chart .floor{stroke:var(--again);stroke-width:2;stroke-dasharray:3 3}
.chart .cursor{stroke:var(--ink);stroke-width:1;stroke-dasharray:1 3}
"""

_WHY: Final = {"oom": "does not fit", "thrash": "takes too long"}
_SAMPLES: Final = {"today": ("today", 6.0), "segments": ("segments", 5.0), "plan": ("plan-dot", 4.0)}
"""Class and size of the points in the legend."""


def document(study: Study, today: Mark | None) -> str:
    """The picture as a file of its own."""
    picture = curve(study, today, 900)
    style = f"<style>{STYLE}{DRAWING}svg{{background:var(--back)}}</style>"
    head, _, rest = picture.partition(">")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def curve(study: Study, today: Mark | None, width: int) -> str:
    """The picture, so many pixels wide."""
    return _Curve(study, today, width).draw()


def described(study: Study) -> str:
    """The picture in words, for those who do not see it."""
    works = [mark for mark in study.curve if mark.overhead is not None]
    if not works:
        return "No budget works."
    least, most = works[0], works[-1]
    text = (
        f"Overhead from {most.overhead:.2f} at {most.share:.0%} of the peak to {least.overhead:.2f} at "
        f"{least.share:.0%}, the least budget that works."
    )
    inner = [hole for hole in study.holes if hole.start]
    if inner:
        text += (
            " These stretches do not work: " + ", ".join(f"{hole.start:.1%} to {hole.stop:.1%}" for hole in inner) + "."
        )
    return text


class _Curve:
    def __init__(self, study: Study, today: Mark | None, width: int) -> None:
        self.study, self.today, self.width = study, today, width
        self.small = width < 600
        self.left, self.right = (42, 50) if self.small else (56, 70)
        self.top, self.bottom = 28, 270 if self.small else 340
        self.height = self.bottom
        values = [mark.overhead for mark in self._marks() if mark.overhead is not None and mark.overhead <= study.limit]
        self.most = 1 + max(0.02, 1.08 * (max([1.0, *values]) - 1))
        self.parts: list[str] = []

    def _marks(self) -> list[Mark]:
        study = self.study
        dots = [mark for mark in (study.segments, self.today) if mark is not None]
        return [*study.curve, *study.curve_with_tier, *study.planned, *dots]

    def x(self, share: float) -> float:
        return self.left + (self.width - self.left - self.right) * min(1.08, share) / 1.04

    def y(self, overhead: float) -> float:
        return self.bottom - (self.bottom - self.top) * (overhead - 1) / (self.most - 1)

    def draw(self) -> str:
        self._holes()
        self._axes()
        study = self.study
        self._line("plan", study.planned, "diamond", joined=False)  # there are few
        self._line("tier", study.curve_with_tier, "square")
        self._line("policy", study.curve, "dot")
        for kind, mark in (("segments", study.segments), ("today", self.today)):
            if mark is not None and mark.overhead is not None and mark.overhead <= self.most:
                self._mark(kind, kind, mark)
        self._put("line", {"class": "cursor", "x1": -9, "x2": -9, "y1": self.top, "y2": self.bottom})
        self._legend()
        title = f"<title>Overhead against budget</title><desc>{escape(described(study))}</desc>"
        return (
            f'<svg class="chart curve" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'data-left="{self.x(0):.1f}" data-one="{self.x(1):.1f}">{title}{"".join(self.parts)}</svg>'
        )

    def _put(self, tag: str, attributes: dict[str, Any], text: str = "") -> None:
        given = "".join(
            f' {key}="{value:.1f}"' if isinstance(value, float) else f' {key}="{escape(str(value))}"'
            for key, value in attributes.items()
        )
        self.parts.append(f"<{tag}{given}>{text}</{tag}>")

    def _text(self, x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> None:
        attributes = {"x": float(x), "y": float(y), "text-anchor": anchor, **({"class": kind} if kind else {})}
        self._put("text", attributes, escape(text))

    def _holes(self) -> None:
        """Shaded and hatched, so that colour is not all that tells them."""
        for hole in self.study.holes:
            left, right = self.x(hole.start), self.x(hole.stop)
            box = {"x": left, "y": self.top, "width": right - left, "height": self.bottom - self.top}
            self._put("rect", {"class": "hole", **box}, f"<title>{_WHY[hole.why]}</title>")
            step, high = 9.0, self.bottom - self.top
            at = left - high
            path = ""
            while at < right:  # lines at 45 degrees, cut off at the sides
                x1, x2 = max(at, left), min(at + high, right)
                if x2 > x1:
                    path += f"M{x1:.1f} {self.bottom - (x1 - at):.1f}L{x2:.1f} {self.bottom - (x2 - at):.1f}"
                at += step
            self._put("path", {"class": "hatch", "d": path})

    def _axes(self) -> None:
        study, whole = self.study, self.study.subject.whole
        program = study.subject.program
        model = program.model_time * program.unit
        for tick in _ticks(self.most - 1, 4 if self.small else 5):
            y = self.y(1 + tick)
            self._put("line", {"class": "grid", "x1": self.left, "x2": self.width - self.right, "y1": y, "y2": y})
            self._text(self.left - 6, y + 4, f"{1 + tick:.4g}", "end")
            self._text(self.width - self.right + 6, y + 4, seconds(model * (1 + tick)), "start")
        for percent in range(0, 101, 25 if self.small else 10):
            x = self.x(percent / 100)
            self._put("line", {"class": "axis", "x1": x, "x2": x, "y1": self.bottom, "y2": self.bottom + 4})
            self._text(x, self.bottom + 17, f"{percent}%", kind="strong")
            if percent and (self.small or percent % 20 == 0):
                self._text(x, self.bottom + 32, format_bytes(whole * percent / 100))
        self._text(2, 14, "overhead", "start", "strong")
        self._text(self.width - 2, 14, "compute", "end", "strong")
        edge = {"class": "axis", "x1": self.left, "x2": self.width - self.right, "y1": self.bottom, "y2": self.bottom}
        self._put("line", edge)
        x = self.x(study.floor.operation)
        self._put(
            "line",
            {"class": "floor", "x1": x, "x2": x, "y1": self.top, "y2": self.bottom},
            f"<title>{format_bytes(study.floor.operation * whole)}: sources and the largest operation</title>",
        )

    def _line(self, kind: str, marks: Sequence[Mark], shape: str, *, joined: bool = True) -> None:
        path, pen = "", "M"
        for mark in marks:
            if mark.overhead is None or mark.overhead > self.most:
                pen = "M"  # nothing is drawn across
                continue
            path += f"{pen}{self.x(mark.share):.1f} {self.y(mark.overhead):.1f}"
            pen = "L"
        if path and joined:
            self._put("path", {"class": kind, "d": path})
        for mark in marks:
            if mark.overhead is not None and mark.overhead <= self.most:
                self._mark(f"{kind}-dot", shape, mark)

    def _mark(self, kind: str, shape: str, mark: Mark) -> None:
        assert mark.overhead is not None
        told = f"<title>{format_bytes(mark.budget)}, {mark.share:.1%}: overhead {mark.overhead:.3f}</title>"
        size = {"dot": 3.5, "today": 7.0, "segments": 7.0}.get(shape, 4.0)
        self._shape(kind, shape, self.x(mark.share), self.y(mark.overhead), size, told)

    def _shape(self, kind: str, shape: str, x: float, y: float, size: float, told: str = "") -> None:
        if shape in ("dot", "today"):
            self._put("circle", {"class": kind, "cx": x, "cy": y, "r": size}, told)
        else:
            turn = {} if shape == "square" else {"transform": f"rotate(45 {x:.1f} {y:.1f})"}
            box = {"x": x - size, "y": y - size, "width": 2 * size, "height": 2 * size}
            self._put("rect", {"class": kind, **box, **turn}, told)

    def _legend(self) -> None:
        study = self.study
        entries: list[tuple[str, str]] = [("policy", "as recompute decides")]
        if study.curve_with_tier:
            entries.append(("tier", f"with a tier of {study.tier}"))
        if any(mark.overhead is not None for mark in study.planned):
            entries.append(("plan", "planned ahead"))
        if study.segments is not None:
            entries.append(("segments", "checkpoint by segments"))
        if self.today is not None:
            entries.append(("today", "the recorded run"))
        entries.append(("floor", "floor: sources, largest operation"))
        if study.holes:
            entries.append(("hole", f"does not fit, or takes over {study.limit:g} times"))
        columns = 1 if self.small else 3
        wide = (self.width - self.left) / columns
        self.height = self.bottom + 64 + 18 * ((len(entries) - 1) // columns)
        for number, (kind, text) in enumerate(entries):
            x, y = self.left + wide * (number % columns), self.bottom + 56.0 + 18 * (number // columns)
            if kind == "hole":
                self._put("rect", {"class": kind, "x": x, "y": y - 10, "width": 22, "height": 12})
            elif kind in _SAMPLES:
                shown, size = _SAMPLES[kind]
                self._shape(shown, kind, x + 11, y - 4, size)
            else:
                self._put("path", {"class": kind, "d": f"M{x:.1f} {y - 4:.1f}h22"})
            self._text(x + 28, y, text, "start", "strong")


def _ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`."""
    raw = most / count
    unit = 10.0 ** int(f"{raw:e}".partition("e")[2])
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw)
    return [step * at for at in range(int(most / step) + 1)]
