"""Text for people, as this library reads and writes it: budgets, bytes, seconds, names, tables, warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

from recompute._budget import bytes_or_peak, bytes_or_share, format_bytes, parse_budget
from recompute._interrupts import is_interrupt

__all__ = [
    "List",
    "Table",
    "bytes_or_peak",
    "bytes_or_share",
    "format_bytes",
    "name_of",
    "outside",
    "parse_budget",
    "seconds",
    "warn",
]


@dataclass(frozen=True)
class List:
    """Rows under column names. `align`: "<" or ">" for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str


@dataclass(frozen=True)
class Table:
    """A title, labels with values, and lists below."""

    title: str
    pairs: Sequence[tuple[str, str]]
    lists: Sequence[List] = ()

    def __str__(self) -> str:
        lines = [self.title, *aligned(self.pairs, "<<")]
        for found in self.lists:
            lines += ["", *aligned([found.columns, *found.rows], found.align)]
        return "\n".join(lines)

    def html(self) -> str:
        """As a fragment of HTML, whatever the texts contain."""
        from html import escape  # when it is used: `import recompute` is to be quick

        parts = [f"<div><strong>{escape(self.title)}</strong>", _html([], self.pairs, "<<")]
        parts += [_html(found.columns, found.rows, found.align) for found in self.lists]
        return "".join([*parts, "</div>"])


def aligned(rows: Iterable[Sequence[str]], align: str, paint: Callable[[str], str] = str) -> list[str]:
    """Rows as indented lines whose columns stand below each other; `paint` colours the first one."""
    rows = list(rows)
    widths = [max(len(row[at]) for row in rows) if rows else 0 for at in range(len(align))]
    lines = []
    for row in rows:
        first, *others = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        lines.append("  " + "  ".join([paint(first), *others]).rstrip())
    return lines


def fitted(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: str,
    width: int,
    paint: Callable[[str], str] = str,
    paint_head: Callable[[str], str] = str,
) -> list[str]:
    """`aligned` if that fits into lines of `width` characters; else with longer lines broken, but never a word."""
    lines = aligned([columns, *rows] if columns else rows, align)
    if max(map(len, lines), default=0) <= width:
        lines = aligned([columns, *rows] if columns else rows, align, paint)
        return [paint_head(lines[0]), *lines[1:]] if columns else lines
    if not columns:
        return _hanging([(row[0], row[1]) for row in rows], width, 2, paint)
    blocks = [f"  {paint_head(columns[0])}"]
    for first, *others in rows:
        blocks.append(f"  {paint(first)}")
        blocks += _hanging([pair for pair in zip(columns[1:], others, strict=True) if pair[1]], width, 4, paint_head)
    return blocks


def _hanging(pairs: Sequence[tuple[str, str]], width: int, indent: int, paint: Callable[[str], str]) -> list[str]:
    """Labels and values; a value goes on below itself, or begins below its label if its words need the room."""
    left = max((len(label) for label, _ in pairs), default=0)
    lines = []
    for label, value in pairs:
        beside = indent + left + 2
        if beside + max(map(len, value.split()), default=0) > width:
            lines.append(f"{' ' * indent}{paint(label)}")
            lines += [" " * (indent + 2) + line for line in folded(value, width - indent - 2)]
        else:
            first, *others = folded(value, width - beside)
            lines.append(f"{' ' * indent}{paint(f'{label:<{left}}')}  {first}".rstrip())
            lines += [" " * beside + line for line in others]
    return lines


def folded(text: str, width: int) -> list[str]:
    """Lines of whole words, at least one line; a word that is longer than `width` is one by itself."""
    from textwrap import wrap  # when it is used: `import recompute` is to be quick

    return wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


def _html(columns: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    from html import escape

    styles = [f' style="text-align: {"left" if side == "<" else "right"}"' for side in align]

    def line(tag: str, cells: Sequence[str]) -> str:
        parts = [f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True)]
        return f"<tr>{''.join(parts)}</tr>"

    head = f"<thead>{line('th', columns)}</thead>" if columns else ""
    return f"<table>{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def seconds(time: float) -> str:
    """A duration for people."""
    if time < 1:
        return f"{time * 1000:.3g} ms" if time >= 1e-3 else _microseconds(time)
    if time < 120:
        return f"{time:.3g} s"
    whole = round(time)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _microseconds(time: float) -> str:
    return "0 s" if not time else "< 1 us" if time < 1e-6 else f"{time * 1e6:.3g} us"


def name_of(function: Any) -> str:
    """A readable name for any callable."""
    return _name_by(_said, function)


def name_at_rest(function: Any) -> str:
    """The same, but no code of the user's runs, such as `__getattr__` or a property: for use under the lock."""
    return _name_by(_stored, function)


def _name_by(attribute_of: Callable[[Any, str], Any], function: Any) -> str:
    for _ in range(8):  # a partial of a partial of ...
        if type(function) is MethodType:
            function = function.__func__
        for attribute in ("__qualname__", "__name__"):
            name = attribute_of(function, attribute)
            if isinstance(name, str) and name:
                return qualified(name)
        inner = attribute_of(function, "func")
        function = type(function) if inner is None else inner
    return "?"


def _said(function: Any, attribute: str) -> Any:
    """What an object says that it has; None: nothing."""
    try:
        return getattr(function, attribute, None)
    except Exception as error:  # the user's `__getattr__`
        if is_interrupt(error):
            raise
        return None


def _stored(value: Any, attribute: str) -> Any:
    """What is in an object's dictionary, its slots or its fields in C, or in its class; None: nothing."""
    if attribute != "__dict__":
        attributes = _stored(value, "__dict__")
        if type(attributes) is dict and attribute in attributes:
            return attributes[attribute]
    cls = type(value)
    for base in type.__getattribute__(cls, "__mro__"):
        names = type.__getattribute__(base, "__dict__")
        if attribute in names:
            found = names[attribute]
            if type(found) in (GetSetDescriptorType, MemberDescriptorType) or _is_ours(found):
                try:
                    return found.__get__(value, cls)
                except AttributeError:  # a slot that is empty
                    return None
            return found
    return None


def _is_ours(found: Any) -> bool:
    """Whether it is a property that an adapter of this library defines."""
    return type(found) is property and getattr(found.fget, "__module__", "").startswith("recompute")


def qualified(name: str) -> str:
    """A qualified name without the noise."""
    return name.replace(".<locals>", "")


def warn(message: str, category: type[Warning], stacklevel: int = 1) -> None:
    """`warnings.warn`, and a record at the level WARNING."""
    logging = sys.modules.get("logging")
    if logging is not None:
        logger = logging.getLogger("recompute")
        if not logger.handlers:  # else `logging` would print what Python prints anyway
            logger.addHandler(logging.NullHandler())
        logger.warning("%s", message, stacklevel=stacklevel + 1)
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def outside(package: str = "recompute") -> int:
    """The `stacklevel` of the program's own call, for a `warn` in the function that asks.

    That is outside of `package`, too, and of what stands between them in a block that a generator makes.
    """
    inside = ("recompute", "contextlib", package)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
