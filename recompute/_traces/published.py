"""The trace format of the DTR authors' simulator: one JSON object a line, with an INSTRUCTION (Kirisame et al.,
ICLR 2021).

In-place writes become copies: the operation makes a new value, which the written name means from then on. Constants
stay in memory to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from recompute._traces.program import Program


class Published:
    """Builds a program from the objects of a published trace, one at a time. Raises ValueError, which says why."""

    def __init__(self, name: str) -> None:
        self.program = Program(name, unit=1e-9, published=True)
        self._values: dict[str, int] = {}  # what a name means; in the order of first definition
        self._held: dict[str, int] = {}  # name -> references
        self._references: dict[int, int] = {}  # value -> references of all names together
        self._pending: _Pending | None = None
        self._instructions: dict[str, Callable[[dict[str, Any]], None]] = {
            "ANNOTATE": self._annotate,
            "CONSTANT": self._constant,
            "CALL": self._call,
            "MEMORY": self._memory,
            "ALIAS": self._alias,
            "MUTATE": self._mutate,
            "COPY": self._copy,
            "COPY_FROM": self._copy_from,
            "RELEASE": self._release,
        }

    def add(self, line: dict[str, Any]) -> None:
        """The next line."""
        instruction = line.get("INSTRUCTION")
        run = self._instructions.get(instruction) if isinstance(instruction, str) else None
        if run is None:
            raise ValueError(f"unknown INSTRUCTION {instruction!r}; known are {', '.join(self._instructions)}")
        if self._pending is not None and instruction not in ("MEMORY", "ALIAS"):
            raise ValueError(f"{instruction}, but {self._pending.lacks()}")
        run(line)

    def finish(self) -> Program:
        """The program, after the last line."""
        if self._pending is not None:
            raise ValueError(f"the file is truncated: {self._pending.lacks()}")
        program = self.program
        if not math.isfinite(program.model_time):
            raise ValueError("the TIME of all operations together is too large a number")
        kept = (self._values[name] for name in self._values if self._held[name] > 0)
        program.outputs = [value for value in dict.fromkeys(kept) if program.makers[value] >= 0]
        return program

    def _annotate(self, line: dict[str, Any]) -> None:
        text = line.get("ANNOTATION")
        if text != "START":
            self.program.marks.append((len(self.program.calls), str(text)))

    def _constant(self, line: dict[str, Any]) -> None:
        self._pending = _Pending("", (_text(line, "NAME"),))

    def _call(self, line: dict[str, Any]) -> None:
        results = _texts(line, "RESULT")
        if len(set(results)) < len(results):
            raise ValueError("a name occurs twice in RESULT")
        arguments = tuple([self._value(name) for name in _texts(line, "ARGS")])
        self._pending = _Pending(_text(line, "NAME"), results, arguments, _number(line, "TIME"))
        self._complete()

    def _memory(self, line: dict[str, Any]) -> None:
        pending, name = self._described(line)
        pending.sizes[name] = _bytes(line)
        self._complete()

    def _alias(self, line: dict[str, Any]) -> None:
        pending, name = self._described(line)
        pending.aliases[name] = _index(line.get("ALIAS"), "ALIAS", len(pending.arguments), -1)
        self._complete()

    def _described(self, line: dict[str, Any]) -> tuple[_Pending, str]:
        pending, name = self._pending, _text(line, "NAME")
        if pending is None or name not in pending.results:
            raise ValueError(f"{line['INSTRUCTION']} of {name!r}, which is no result of the CALL or CONSTANT before it")
        return pending, name

    def _complete(self) -> None:
        """Make the constant or call once all of its results are described."""
        pending = self._pending
        if pending is None or not pending.is_complete:
            return
        self._pending = None
        names = pending.results
        sizes = [pending.sizes[name] for name in names]
        if not pending.name:
            self._define(names[0], self.program.add_source(sizes[0]))
            return
        storages = []
        for name, size in zip(names, sizes, strict=True):
            index = pending.aliases[name]
            new = index < 0
            storages.append(self.program.add_storage(size) if new else self.program.storages[pending.arguments[index]])
        for name, value in zip(names, self._run(pending, storages), strict=True):
            self._define(name, value)

    def _run(self, call: _Pending, storages: list[int]) -> tuple[int, ...]:
        if storages:
            return self.program.add_call(call.name, call.arguments, storages, call.cost)
        (nothing,) = self.program.add_call(call.name, call.arguments, [self.program.add_storage(0)], call.cost)
        self.program.steps.append(("drop", nothing))
        return ()

    def _mutate(self, line: dict[str, Any]) -> None:
        names = _texts(line, "ARGS")
        arguments = tuple([self._value(name) for name in names])
        indices = line.get("MUTATE")
        if not isinstance(indices, list):
            raise ValueError(f"MUTATE needs a list of indices into ARGS as MUTATE, not {indices!r}")
        written = [_index(index, "MUTATE", len(names), 0) for index in indices]
        sizes = [self.program.sizes[self.program.storages[arguments[index]]] for index in written]
        call = _Pending(_text(line, "NAME"), (), arguments, _number(line, "TIME"))
        made = self._run(call, [self.program.add_storage(size) for size in sizes])
        for index, value in zip(written, made, strict=True):
            self._rebind(names[index], value)

    def _copy(self, line: dict[str, Any]) -> None:
        self._define(_text(line, "DST"), self._value(_text(line, "SRC")))

    def _copy_from(self, line: dict[str, Any]) -> None:
        name, source = _text(line, "DST"), self._value(_text(line, "SRC"))
        self._value(name)
        self._rebind(name, source)

    def _release(self, line: dict[str, Any]) -> None:
        name = _text(line, "NAME")
        if self._held.get(name, 0) > 0:
            self._held[name] -= 1
            self._let_go(self._values[name])

    def _define(self, name: str, value: int) -> None:
        """`name` now means `value`, with one reference; those to what it meant before are gone."""
        before, references = self._values.get(name, value), self._held.get(name, 0)
        self._values[name] = value
        self._held[name] = 1
        self._refer(value)
        for _ in range(references):
            self._let_go(before)

    def _rebind(self, name: str, value: int) -> None:
        """A defined `name` means another value: the references go along."""
        before, references = self._values[name], self._held[name]
        self._values[name] = value
        self._held[name] = max(1, references)
        for _ in range(self._held[name]):
            self._refer(value)
        for _ in range(references):
            self._let_go(before)

    def _refer(self, value: int) -> None:
        count = self._references.get(value)
        if count == 0:
            self.program.steps.append(("keep", value))
        self._references[value] = (count or 0) + 1

    def _let_go(self, value: int) -> None:
        self._references[value] -= 1
        if not self._references[value]:
            self.program.steps.append(("drop", value))

    def _value(self, name: str) -> int:
        value = self._values.get(name)
        if value is None:
            raise ValueError(f"{name!r} is used before it is defined")
        if not self._references[value]:
            self.program.revived.add(value)
        return value


@dataclass(slots=True)
class _Pending:
    """A constant or a call whose results are described by the lines that follow."""

    name: str
    """The operator; empty for a constant."""
    results: tuple[str, ...]
    arguments: tuple[int, ...] = ()
    cost: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.sizes) == len(self.results) and (not self.name or len(self.aliases) == len(self.results))

    def lacks(self) -> str:
        """The line that is missing."""
        name = next((result for result in self.results if result not in self.sizes), None)
        what = "MEMORY" if name is not None else "ALIAS"
        name = name or next(result for result in self.results if result not in self.aliases)
        return f"{f'the CALL of {self.name}' if self.name else 'the CONSTANT'} lacks the {what} of {name!r}"


def _text(line: dict[str, Any], key: str) -> str:
    text = line.get(key)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{line['INSTRUCTION']} needs a text as {key}, not {text!r}")
    return text


def _texts(line: dict[str, Any], key: str) -> tuple[str, ...]:
    texts = line.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{line['INSTRUCTION']} needs a list of names as {key}, not {texts!r}")
    return tuple(texts)


def _number(line: dict[str, Any], key: str) -> float:
    """Not negative, and finite; numbers come as text."""
    given = line.get(key)
    number = math.nan
    if isinstance(given, (int, float, str)) and not isinstance(given, bool):
        with suppress(ValueError, OverflowError):
            number = float(given)
    if not math.isfinite(number):
        raise ValueError(f"{line['INSTRUCTION']} needs a number as {key}, not {given!r}")
    if number < 0:
        raise ValueError(f"{key} must not be negative, but is {given}")
    return number


def _bytes(line: dict[str, Any]) -> int:
    size = _number(line, "MEMORY")
    if size != int(size) or size >= 2**63:
        raise ValueError(f"MEMORY must be whole bytes, less than 2**63, not {line['MEMORY']!r}")
    try:
        return int(line["MEMORY"])  # exact, where a float is not
    except ValueError:
        return int(size)


def _index(given: Any, key: str, count: int, least: int) -> int:
    """An index into the arguments."""
    try:
        index = int(given) if isinstance(given, (int, str)) and not isinstance(given, bool) else None
    except ValueError:
        index = None
    if index is None or not least <= index < count:
        also = "-1 or " if least < 0 else ""
        raise ValueError(f"{key} must be {also}an index into ARGS, of which there are {count}, not {given!r}")
    return index
