"""Reading the published format: what each instruction means, by small traces written here."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recompute.traces import Program, read

Line = dict[str, Any]
Write = Callable[..., Program]


@pytest.fixture
def load(tmp_path: Path) -> Write:
    """Write lines to a file and read them as a program."""

    def write(*parts: Line | list[Line]) -> Program:
        lines = [line for part in parts for line in (part if isinstance(part, list) else [part])]
        path = tmp_path / "small.log"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read(path)

    return write


def constant(name: str, size: int = 8) -> list[Line]:
    return [{"INSTRUCTION": "CONSTANT", "NAME": name}, {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}]


def call(function: str, arguments: str, results: str, size: int = 8, time: int = 1, **alias: int) -> list[Line]:
    """An operation on names of one letter; `alias` has the position of the argument whose memory a result shares."""
    lines: list[Line] = [
        {"INSTRUCTION": "CALL", "NAME": function, "ARGS": [*arguments], "RESULT": [*results], "TIME": str(time)}
    ]
    for result in results:
        shared = alias.get(result, -1)
        lines.append({"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(size if shared < 0 else 0)})
        lines.append({"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(shared)})
    return lines


def release(name: str) -> Line:
    return {"INSTRUCTION": "RELEASE", "NAME": name}


def annotate(text: str) -> Line:
    return {"INSTRUCTION": "ANNOTATE", "ANNOTATION": text}


def mutate(arguments: str, *indices: int) -> Line:
    return {"INSTRUCTION": "MUTATE", "NAME": "write", "ARGS": [*arguments], "MUTATE": list(indices), "TIME": "5"}


def copy(to: str, source: str, instruction: str = "COPY") -> Line:
    return {"INSTRUCTION": instruction, "DST": to, "SRC": source}


def test_constants_are_sources(load: Write) -> None:
    """A constant is a source, and no output; its release is a step, as that of any value."""
    program = load(constant("x", 40), release("x"))
    assert (program.sizes, program.makers, program.steps) == ([40], [-1], [("source", 0), ("drop", 0)])
    assert program.outputs == []


def test_a_call(load: Write) -> None:
    """Arguments, cost in nanoseconds, and a storage of its own for the result."""
    program = load(constant("x"), call("f", "xx", "y", 24, 700))
    (made,) = program.calls
    assert (made.name, made.arguments, made.results, made.cost) == ("f", (0, 0), (1,), 700.0)
    assert (program.sizes, program.storages, program.unit) == ([8, 24], [0, 1], 1e-9)
    assert program.model_time == 700.0


def test_an_alias_shares_its_arguments_storage(load: Write) -> None:
    """A view has no memory of its own; an alias of an alias shares the first one's."""
    program = load(call("f", "", "a", 16), call("view", "a", "b", b=0), call("view", "b", "c", c=0))
    assert (program.sizes, program.storages) == ([16], [0, 0, 0])


def test_several_outputs(load: Write) -> None:
    """Each has a storage of its own, unless it is an alias."""
    program = load(constant("x"), call("f", "x", "abc", 16, b=0))
    assert program.calls[0].results == (1, 2, 3)
    assert (program.sizes, program.storages) == ([8, 16, 16], [0, 1, 0, 2])
    assert program.outputs == [1, 2, 3]


def test_a_call_without_results(load: Write) -> None:
    """It takes its time, and what it makes is nothing, at once dropped."""
    program = load(constant("x"), call("f", "x", "", time=3))
    assert program.model_time == 3
    assert program.steps[-2:] == [("call", 0), ("drop", 1)]
    assert program.sizes[1] == 0


def test_mutation_is_copy_on_write(load: Write) -> None:
    """The written name means a new value of the same size, and the old one loses its reference."""
    program = load(constant("x"), call("f", "", "a", 16), mutate("xa", 1), call("g", "a", "b"))
    write, after = program.calls[1:]
    assert (write.arguments, write.results, write.cost) == ((0, 1), (2,), 5.0)
    assert program.sizes[program.storages[2]] == 16
    assert after.arguments == (2,)
    assert ("drop", 1) in program.steps
    assert program.outputs == [2, 3]


def test_other_names_keep_the_value_before_a_mutation(load: Write) -> None:
    """A second name of what is written still means the old value."""
    program = load(call("f", "", "a"), copy("b", "a"), mutate("a", 0), call("g", "b", "c"))
    assert program.calls[2].arguments == (0,)
    assert ("drop", 0) not in program.steps
    assert program.outputs == [1, 0, 2]


def test_a_copy_is_one_more_reference(load: Write) -> None:
    """The value is dropped with the last of its names."""
    program = load(call("f", "", "a"), copy("b", "a"), release("a"), call("g", "b", "c"), release("b"))
    assert program.steps == [("call", 0), ("call", 1), ("drop", 0)]
    assert program.outputs == [1]


def test_copy_from_gives_a_name_another_value(load: Write) -> None:
    """The value before loses its reference, the other one gains it."""
    program = load(call("f", "", "a"), call("f", "", "b"), copy("a", "b", "COPY_FROM"), release("b"))
    assert program.steps == [("call", 0), ("call", 1), ("drop", 0)]
    assert program.outputs == [1]


def test_a_name_that_is_defined_again(load: Write) -> None:
    """What it meant before is let go."""
    program = load(call("f", "", "a"), call("g", "a", "a"))
    assert program.steps == [("call", 0), ("call", 1), ("drop", 0)]
    assert program.outputs == [1]


def test_release_of_an_unknown_name_is_ignored(load: Write) -> None:
    """Traces release names that were defined before their start; releasing twice changes nothing either."""
    program = load(release("z"), call("f", "", "a"), release("a"), release("a"))
    assert program.steps == [("call", 0), ("drop", 0)]
    assert program.outputs == []


def test_what_comes_before_the_start_is_skipped(load: Write) -> None:
    """Even what is no instruction; without a START everything counts."""
    program = load({"INSTRUCTION": "WARM UP"}, call("f", "", "a"), annotate("START"), call("g", "", "b"))
    assert [call.name for call in program.calls] == ["g"]
    assert [loaded.name for loaded in load(call("f", "", "a"), call("g", "", "b")).calls] == ["f", "g"]


def test_annotations_are_marks(load: Write) -> None:
    """They say before which call they stand, and change nothing else."""
    program = load(annotate("START"), call("f", "", "a"), annotate("BACKWARD"), call("g", "a", "b"))
    assert program.marks == [(1, "BACKWARD")]
    assert program.steps == [("call", 0), ("call", 1)]


def test_outputs_are_in_order_of_first_definition(load: Write) -> None:
    """Of the names: one that was written later keeps its place."""
    program = load(call("f", "", "a"), call("f", "", "b"), mutate("a", 0))
    assert program.outputs == [2, 1]


def test_gzip_and_empty_lines(tmp_path: Path) -> None:
    """A compressed trace is known by its first bytes, not by its name; empty lines are skipped."""
    text = "\n".join(json.dumps(line) + "\n" for line in [*constant("x"), *call("f", "x", "y")])
    (tmp_path / "plain.gz").write_text(text)
    (tmp_path / "zipped.log").write_bytes(gzip.compress(text.encode()))
    plain, zipped = read(tmp_path / "plain.gz"), read(str(tmp_path / "zipped.log"))
    assert plain.calls == zipped.calls
    assert plain.steps == zipped.steps
    assert repr(plain) == "<program plain.gz: 1 operations, 2 storages>"
