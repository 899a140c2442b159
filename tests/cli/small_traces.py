"""Small recorded programs in the published format, written by the tests of commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def call(name: str, arguments: list[str], result: str, size: int = 100, time: int = 1000) -> list[Line]:
    """The lines of an operation with one result of its own."""
    return [
        {"INSTRUCTION": "CALL", "NAME": name, "ARGS": arguments, "RESULT": [result], "TIME": str(time)},
        {"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(size)},
        {"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": "-1"},
    ]


def training(steps: int = 8, skip: bool = False) -> list[Line]:
    """A forward pass, a mark, and a backward pass that needs all of its values. `skip`: one operation has one more."""
    lines: list[Line] = [
        {"INSTRUCTION": "CONSTANT", "NAME": "f0"},
        {"INSTRUCTION": "MEMORY", "NAME": "f0", "MEMORY": "10"},
    ]
    for step in range(1, steps + 1):
        lines += call("forward", [f"f{step - 1}"] + (["f1"] if skip and step == steps else []), f"f{step}")
    lines += [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}, *call("backward", [f"f{steps}"], f"b{steps}")]
    lines.append({"INSTRUCTION": "RELEASE", "NAME": f"f{steps}"})
    for step in range(steps - 1, 0, -1):
        lines += call("backward", [f"b{step + 1}", f"f{step - 1}"], f"b{step}")
        lines += [{"INSTRUCTION": "RELEASE", "NAME": name} for name in (f"b{step + 1}", f"f{step - 1}") if name != "f0"]
    lines += [{"INSTRUCTION": "RELEASE", "NAME": f"f{steps - 1}"}]
    return lines


def write(path: Path, lines: list[Line]) -> str:
    """Write a trace, gzip if the name ends in .gz; its path."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
    return str(path)
