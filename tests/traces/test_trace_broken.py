"""Traces that cannot be read: one line that says file, line and what is wrong, and never another exception."""

from __future__ import annotations

import gzip
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import ManualClock
from recompute.traces import TraceError, read, recorded_events

Line = dict[str, Any]

DATA = Path(__file__).parent / "data"

PUBLISHED: list[Line] = [
    {"INSTRUCTION": "CONSTANT", "NAME": "x"},
    {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "8"},
    {"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["x"], "RESULT": ["y"], "TIME": "10"},
    {"INSTRUCTION": "MEMORY", "NAME": "y", "MEMORY": "8"},
    {"INSTRUCTION": "ALIAS", "NAME": "y", "ALIAS": "-1"},
    {"INSTRUCTION": "MUTATE", "NAME": "g", "ARGS": ["x", "y"], "MUTATE": [1], "TIME": "2"},
    {"INSTRUCTION": "COPY", "DST": "z", "SRC": "y"},
    {"INSTRUCTION": "COPY_FROM", "DST": "z", "SRC": "x"},
    {"INSTRUCTION": "RELEASE", "NAME": "y"},
]

RECORDED: list[Line] = [
    {"recompute-trace": 1},
    {"event": "Added", "time": 0.0, "used": 8, "storage": 1, "nbytes": 8, "device": "cpu"},
    {
        "event": "Performed",
        "time": 1.0,
        "used": 16,
        "function": "f",
        "cost": 1.0,
        "again": False,
        "storages": [2],
        "nbytes": [8],
        "arguments": [1],
        "results": [2],
        "homes": [2],
        "inputs": [1],
        "device": "cpu",
        "room": 8,
    },
    {"event": "Accessed", "time": 1.0, "used": 16, "value": 2},
    {
        "event": "Evicted",
        "time": 1.0,
        "used": 16,
        "storage": 2,
        "nbytes": 8,
        "why": "request",
        "held": True,
        "ghosts": [2],
    },
    {"event": "TakenBack", "time": 1.0, "used": 16, "storage": 2, "nbytes": 8},
    {"event": "End"},
]


def text(lines: list[Line]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def changed(lines: list[Line], number: int, **fields: Any) -> str:
    """The lines with fields of one of them, counted from one, changed."""
    return text([{**line, **fields} if at == number else line for at, line in enumerate(lines, 1)])


def without(lines: list[Line], number: int) -> str:
    return text(lines[: number - 1] + lines[number:])


def fault(path: Path) -> str:
    """What is said of a trace, after its path: one line."""
    with pytest.raises(TraceError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert len(message.splitlines()) == 1
    assert len(message) < len(str(path)) + 400
    return message.removeprefix(f"{path}:")


def test_the_examples_are_right(tmp_path: Path) -> None:
    """What the tests below break can be read."""
    for lines in (PUBLISHED, RECORDED):
        path = tmp_path / "whole"
        path.write_text(text(lines))
        assert read(path).calls


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "1: the trace is empty"),
        ("\n\n", "1: the trace is empty"),
        ("\x00\xff\x93\n\x80abc\n", "1: not JSON"),
        ("hello, world\n", "1: not JSON"),
        ("[1, 2]\n", "1: a line must be a JSON object, not [1, 2]"),
        ("17\n", "1: a line must be a JSON object"),
        ("{}\n", "1: this is no trace: its first line has neither 'recompute-trace' nor 'INSTRUCTION'"),
        ("[" * 100_000, "1: "),
        (text(PUBLISHED)[:-5], "9: not JSON"),
        (changed(PUBLISHED, 9, INSTRUCTION="EXPLODE"), "9: unknown INSTRUCTION 'EXPLODE'; known are "),
        (changed(PUBLISHED, 9, INSTRUCTION=["CALL"]), "9: unknown INSTRUCTION ['CALL']"),
        (changed(PUBLISHED, 3, ARGS=["w"]), "3: 'w' is used before it is defined"),
        (changed(PUBLISHED, 6, ARGS=["w", "y"]), "6: 'w' is used before it is defined"),
        (changed(PUBLISHED, 7, SRC="w"), "7: 'w' is used before it is defined"),
        (changed(PUBLISHED, 8, DST="w"), "8: 'w' is used before it is defined"),
        (changed(PUBLISHED, 2, MEMORY="-8"), "2: MEMORY must not be negative, but is -8"),
        (changed(PUBLISHED, 2, MEMORY="1.5"), "2: MEMORY must be whole bytes"),
        (changed(PUBLISHED, 2, MEMORY="much"), "2: MEMORY needs a number as MEMORY, not 'much'"),
        (changed(PUBLISHED, 2, MEMORY="nan"), "2: MEMORY needs a number"),
        (changed(PUBLISHED, 2, MEMORY=None), "2: MEMORY needs a number"),
        (changed(PUBLISHED, 3, TIME="-1"), "3: TIME must not be negative"),
        (changed(PUBLISHED, 3, TIME=True), "3: CALL needs a number as TIME"),
        (changed(PUBLISHED, 5, ALIAS="1"), "5: ALIAS must be -1 or an index into ARGS, of which there are 1, not '1'"),
        (changed(PUBLISHED, 5, ALIAS="-2"), "5: ALIAS must be -1 or an index"),
        (changed(PUBLISHED, 6, MUTATE=[2]), "6: MUTATE must be an index into ARGS, of which there are 2, not 2"),
        (changed(PUBLISHED, 6, MUTATE=[-1]), "6: MUTATE must be an index"),
        (changed(PUBLISHED, 6, MUTATE="1"), "6: MUTATE needs a list of indices"),
        (changed(PUBLISHED, 3, ARGS="x"), "3: CALL needs a list of names as ARGS"),
        (changed(PUBLISHED, 3, RESULT=["y", "y"]), "3: a name occurs twice in RESULT"),
        (changed(PUBLISHED, 1, NAME=5), "1: CONSTANT needs a text as NAME, not 5"),
        (changed(PUBLISHED, 4, NAME="w"), "4: MEMORY of 'w', which is no result of the CALL or CONSTANT before it"),
        (without(PUBLISHED, 4), "5: MUTATE, but the CALL of f lacks the MEMORY of 'y'"),
        (text(PUBLISHED[:4]), "4: the file is truncated: the CALL of f lacks the ALIAS of 'y'"),
        (text(PUBLISHED[:1]), "1: the file is truncated: the CONSTANT lacks the MEMORY of 'x'"),
        (text(RECORDED[:-1]), "6: the file is truncated: the line with the event End is missing"),
        (text(RECORDED[:1]), "1: the file is truncated"),
        (text(RECORDED)[:-5], "7: not JSON"),
        (changed(RECORDED, 1, **{"recompute-trace": 99}), "1: format version 99 is not known here, only 1"),
        (changed(RECORDED, 4, event="Exploded"), "4: unknown event 'Exploded'; known are "),
        (changed(RECORDED, 2, nbytes=-8), "2: nbytes must not be negative, but is -8"),
        (changed(RECORDED, 2, nbytes="8"), "2: Added needs a whole number as nbytes, not '8'"),
        (changed(RECORDED, 2, device=None), "2: Added needs a text as device, not None"),
        (changed(RECORDED, 3, inputs=[5]), "3: value 5 is used before it is made"),
        (changed(RECORDED, 3, cost=-1), "3: cost must not be negative, but is -1"),
        (changed(RECORDED, 3, cost="1"), "3: Performed needs a number as cost"),
        (changed(RECORDED, 3, cost=10**400), "3: Performed needs a number as cost, not 1000"),
        (changed(RECORDED, 3, cost=-(10**400)), "3: Performed needs a number as cost, not -1000"),
        (changed(RECORDED, 2, nbytes=10**400), "2: nbytes must be below 2**63, but is 1000"),
        (changed(RECORDED, 2, storage=2**63), "2: storage must be below 2**63"),
        (changed(PUBLISHED, 3, TIME=10**400), "3: CALL needs a number as TIME, not 1000"),
        (changed(PUBLISHED, 2, MEMORY="1" + 300 * "0"), "2: MEMORY must be whole bytes, less than 2**63, not '1000"),
        (changed(RECORDED, 2, device=["x" * 5000]), "2: Added needs a text as device, not ['xxx"),
        (changed(PUBLISHED, 3, ARGS=["x" * 5000]), "3: 'xxx"),
        (changed(PUBLISHED, 9, INSTRUCTION="E" * 5000), "9: unknown INSTRUCTION 'EEE"),
        (changed(RECORDED, 3, nbytes=[-8]), "3: nbytes must not be negative"),
        (changed(RECORDED, 3, homes=[]), "3: results and homes, and storages and nbytes, must go together"),
        (changed(RECORDED, 3, homes=[7]), "3: results and homes, and storages and nbytes, must go together"),
        (changed(RECORDED, 3, results=[1]), "3: a result is made twice"),
        (changed(RECORDED, 3, again=True), "3: an operation runs again whose first run is not there"),
        (changed(RECORDED, 4, value=9), "4: value 9 is used before it is made"),
        (changed(RECORDED, 5, storage=9), "5: storage 9 is used before it is made"),
        (changed(RECORDED, 5, ghosts=[9]), "5: value 9 is used before it is made"),
        (changed(RECORDED, 6, storage=9), "6: storage 9 is used before it is made"),
        (text([*RECORDED[:2], *RECORDED[1:]]), "3: storage 1 is added twice"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_broken_line(tmp_path: Path, content: str, says: str, zipped: bool) -> None:
    """Each kind of fault is named, with the line it is in, in plain and in compressed files."""
    path = tmp_path / "broken.jsonl"
    data = content.encode("latin-1")
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert fault(path).startswith(says)


@pytest.mark.parametrize("lines", [PUBLISHED, RECORDED])
def test_truncated_gzip(tmp_path: Path, lines: list[Line]) -> None:
    """A compressed file that was cut off, or damaged, is told from a whole one, wherever that happened."""
    path = tmp_path / "cut.jsonl.gz"
    data = gzip.compress(text(lines * 1).encode())
    for length in range(2, len(data)):
        path.write_bytes(data[:length])
        assert "truncated or damaged" in fault(path)
    path.write_bytes(data[:-8] + bytes(8))
    assert "truncated or damaged" in fault(path)


@pytest.mark.parametrize(
    ("number", "field", "value"),
    [
        (2, "time", None),
        (2, "time", float("nan")),
        (3, "time", "1.0"),
        (3, "used", 1.5),
        (3, "inputs", 1),
        (3, "nbytes", ["8"]),
        (3, "again", 0),
        (3, "place", {}),
        (3, "room", "8"),
        (5, "why", 3),
        (5, "ghosts", None),
    ],
)
def test_fields_of_events_have_their_types(tmp_path: Path, number: int, field: str, value: Any) -> None:
    """`recorded_events` names the line and the field of another type, and does not hand it on."""
    path = tmp_path / "broken.jsonl"
    path.write_text(changed(RECORDED, number, **{field: value}))
    with pytest.raises(TraceError, match=rf"broken\.jsonl:{number}: this line is no event: {field} is "):
        list(recorded_events(path))


def test_events_of_a_truncated_file(tmp_path: Path) -> None:
    """`recorded_events` says where the file ends too early, as `read` does."""
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(text(RECORDED).encode())[:-9])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz:\d: the file is truncated or damaged"):
        list(recorded_events(path))


def test_a_line_too_many_after_a_fault(tmp_path: Path) -> None:
    """The first fault is the one that is told."""
    path = tmp_path / "two.jsonl"
    path.write_text(changed(PUBLISHED, 2, MEMORY="-8") + "rubbish\n")
    assert fault(path).startswith("2: ")


def test_no_file(tmp_path: Path) -> None:
    """A file that is not there, or a folder, is an OSError as everywhere."""
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    with pytest.raises(OSError, match=r"directory|denied"):
        read(tmp_path)


def whole_traces() -> list[bytes]:
    """A small trace of each format, the recorded one with most events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with rc.Cache("1 kB", clock=ManualClock(), trace=path):
            made = [rc.ap(bytes, 200 + number) for number in range(8)]
            made += [rc.ap(max, one, two) for one, two in pairwise(made)]
            held = made[0].get()
            made[0].evict()
            made[1].pin()
            made[1].unpin()
            made[2].detach()
            made[0].get()
            del made[3:6], held
        recorded = path.read_bytes()
    return [text(PUBLISHED).encode(), recorded, *(path.read_bytes() for path in sorted(DATA.glob("*.log")))]


WHOLE = whole_traces()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A trace with lines dropped, repeated or swapped, values replaced, and bytes changed or cut off."""
    data = draw(st.sampled_from(WHOLE))
    lines = data.splitlines(keepends=True)[:200]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        match draw(st.sampled_from(("drop", "repeat", "swap", "value", "line"))):
            case "drop":
                del lines[at : at + 1]
            case "repeat":
                lines[at:at] = lines[at : at + 1] * 2
            case "swap" if lines:
                other = draw(st.integers(0, len(lines) - 1))
                lines[at], lines[other] = lines[other], lines[at]
            case "value" if lines:
                try:
                    line = json.loads(lines[at])
                except ValueError:
                    continue
                if isinstance(line, dict) and line:
                    line[draw(st.sampled_from(sorted(line)))] = draw(VALUES)
                    lines[at] = json.dumps(line).encode() + b"\n"
            case "line":
                lines[at:at] = [json.dumps(draw(VALUES)).encode() + b"\n"]
    changed = bytearray(b"".join(lines))
    for _ in range(draw(st.integers(0, 3))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        del changed[draw(st.integers(0, len(changed))) :]
    return bytes(changed)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.integers(-2, 9))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=5), SCALARS, max_size=3))


@settings(max_examples=settings().max_examples * 5)
@given(damaged(), st.booleans(), st.integers(-40, 40))
def test_a_damaged_trace_is_a_program_or_one_line(data: bytes, zipped: bool, cut: int) -> None:
    """Whatever is changed in a trace, reading it gives a program or a TraceError."""
    if zipped:
        data = gzip.compress(data)
        data = data[:cut] if cut < 0 else data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(data)
        try:
            read(path)
        except TraceError as error:
            message = str(error)
        else:
            message = f"{path}:"
    assert message.startswith(f"{path}:")
    assert len(message.splitlines()) == 1
    assert len(message) < len(str(path)) + 400
