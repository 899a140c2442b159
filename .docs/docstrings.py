"""Prose after a list of parameters becomes a section of notes: what is raised is said in plain sentences."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object

_HEAD = "Parameters"


class ProseAfterParameters(Extension):
    """Where a docstring goes on after its parameters without a heading, give it one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _with_notes(obj.docstring.value)


def _with_notes(text: str) -> str:
    lines = text.splitlines()
    if _HEAD not in lines:
        return text
    for number in range(lines.index(_HEAD) + 2, len(lines)):
        line, after = lines[number], [*lines[number + 1 :], ""][0]
        is_new = not lines[number - 1].strip() and line and not line.startswith(" ")
        if is_new and not after.startswith((" ", "--")):
            return "\n".join([*lines[:number], "Notes", "-----", *lines[number:]])
    return text
