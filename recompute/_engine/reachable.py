"""Which generators of random numbers an operation could draw from: what it refers to is followed, with an end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final
from weakref import ref

from recompute._adapters.adapter import kinds
from recompute._adapters.generators import Generators
from recompute._engine.arguments import Changeable, Container, Seen
from recompute._engine.functions import Code, content, facts_of, is_silent
from recompute._engine.graph import Operation, Value
from recompute._engine.reach import (
    CONTAINER,
    CONTAINERS,
    FUNCTION,
    METHOD,
    PARTIAL,
    PARTS,
    WRAPPED,
    Chain,
    Found,
    Way,
    attribute,
    defaults_of,
    is_inert,
    members_of,
    reach_of,
    resolved,
    source_of,
    way_of,
)

_OBJECTS: Final = 64
"""That are looked into for one operation."""

_DEEP: Final = 4
"""Objects within each other."""


class _Search:
    """The generators that can be reached from some objects; with an end."""

    __slots__ = ("_left", "_seen", "found", "result")

    def __init__(self) -> None:
        self.found: dict[int, Found] = {}
        self._left = _OBJECTS
        self._seen: dict[int, Any] = {}
        self.result = False

    def add(self, generator: Any, by: Generators) -> None:
        self.found.setdefault(id(by.identity(generator)), Found(generator, by, self.result))

    def at(self, value: Any, depth: int = 0) -> None:
        if _is_inert(value):  # mostly
            return
        way: Any = way_of(type(value))
        if not isinstance(way, Way):
            self.add(value, way)
            return
        if depth > _DEEP or self._left <= 0 or id(value) in self._seen:
            return
        self._left -= 1
        self._seen[id(value)] = value
        if way is FUNCTION:
            self.function(value, None, depth)
        elif way is METHOD:
            of = value.__self__
            inner = getattr(value, "__func__", None)
            if of is not None and not issubclass(type(of), ModuleType):
                self.at(of, depth + 1)
            elif of is None:
                source = source_of(value)
                if source is not None:
                    self.add(source.generator, source.by)
            if type(inner) is FunctionType:
                self.function(inner, of if issubclass(type(of), type) else type(of), depth)
        elif way is PARTIAL:
            for part in (value.func, *value.args, *value.keywords.values()):
                self.at(part, depth + 1)
        elif way is WRAPPED:
            self.at(value.func, depth)
            for part in getattr(value, "values", {}).values():
                self.at(part, depth + 1)
        elif way is CONTAINER:
            for part in _some_of(value):
                self.at(part, depth + 1)
        else:
            self.instance(value, depth)

    def function(self, function: FunctionType, owner: type | None, depth: int) -> None:
        facts = facts_of(function)
        if not facts.bare:
            for cell in function.__closure__ or ():
                self.at(content(cell, None), depth + 1)
            for part in defaults_of(function):
                self.at(part, depth + 1)
        if _names_nothing(function, facts.code, owner):
            return
        reach = reach_of(function, owner)
        for source in reach.sources:
            self.add(source.generator, source.by)
        self.names(function, reach.chains, depth)
        for chain in reach.imported:
            self.at(resolved(sys.modules, chain)[0], depth + 1)
        for cls, name in reach.attributes:
            known = cls()
            if known is not None:
                self.at(attribute(known, name), depth + 1)
        for helper, chains in reach.helpers:
            called = helper()
            if called is not None:
                self.names(called, chains, depth)
                for cell in called.__closure__ or ():
                    self.at(content(cell, None), depth + 1)
                for part in defaults_of(called):
                    self.at(part, depth + 1)

    def names(self, function: FunctionType, chains: Sequence[Chain], depth: int) -> None:
        for chain in chains:
            self.at(resolved(function.__globals__, chain)[0], depth + 1)

    def instance(self, value: Any, depth: int) -> None:
        for member in members_of(type(value)):
            try:
                part = member.__get__(value)
            except AttributeError:  # not set
                continue
            if member.__name__ != "__dict__":
                self.at(part, depth + 1)
            elif isinstance(part, dict):
                for inner in list(part.values()) if len(part) <= PARTS else _first(part.values, PARTS):
                    self.at(inner, depth + 1)


def _some_of(container: Any) -> list[Any]:
    base: Any = next(base for base in type(container).__mro__ if base in CONTAINERS)
    return _first(partial(base.values if base is dict else base.__iter__, container), PARTS // 8)


def _first(parts: Callable[[], Iterable[Any]], most: int) -> list[Any]:
    while True:
        try:
            return list(islice(parts(), most))
        except RecursionError:
            raise
        except RuntimeError:  # another thread, or a destructor, has just changed what they are in
            continue


def reached_by(operation: Operation) -> Sequence[Found]:
    """Mostly nothing, so that this has to be quick."""
    search: _Search | None = None
    if not _is_silent(operation.function):
        search = _Search()
        search.at(operation.function)
    if operation.positional is not operation.arguments:
        for part in operation.positional:
            search = _look(part, search)
    if operation.options is not None and operation.options.keywords:
        for part in operation.options.keywords.values():
            search = _look(part, search)
    for value in operation.arguments:
        if not _is_inert(value.payload):
            search = search or _Search()
            search.result = value.operation is not None or value.storage.pool.tiers is not None
            search.at(value.payload)
    return tuple(search.found.values()) if search is not None and search.found else ()


def _is_inert(part: Any) -> bool:
    """Whether there is nothing to look at in an object."""
    kind = kinds.of(type(part))
    if kind.inert == 0:
        kind.inert = 1 if is_inert(type(part)) else -1
    return kind.inert > 0


def _is_silent(function: Any) -> bool:
    """Whether there is nothing to look at: what it saw, closes over or has as a default, and what it names."""
    if type(function) is Seen:
        for value in function.values.values():
            if not _is_inert(value):
                return False
        function = function.func
    if type(function) is BuiltinFunctionType:
        return isinstance(function.__self__, ModuleType)
    if type(function) is not FunctionType:
        return _is_inert(function)
    facts = facts_of(function)
    if not facts.bare:
        for cell in function.__closure__ or ():
            if not _is_inert(content(cell, None)):
                return False
        for part in function.__defaults__ or ():
            if not _is_inert(part):
                return False
        if function.__kwdefaults__ is not None:
            return False
    return _names_nothing(function, facts.code, None)


def _names_nothing(function: FunctionType, code: Code, owner: type | None) -> bool:
    """Whether nothing to look at is found by the names in its code."""
    home = function.__globals__
    if is_silent(code, owner, home):
        return True
    if code.silent not in (0, id(home)):  # it is shared by modules
        return False
    reach = reach_of(function, owner)
    if not reach.empty:
        return False
    code.silent, code.owner, code.meanings = id(home), None if owner is None else ref(owner), tuple(reach.meanings)
    return True


def _look(part: Any, search: _Search | None) -> _Search | None:
    """At a plain argument. A generator itself is remembered with its state, and later runs get a copy."""
    cls = type(part)
    if cls is Value or _is_inert(part):
        return search
    if cls is Container:
        for inner in part.parts:
            search = _look(inner, search)
        return search
    if cls is Changeable:
        part = part.value
        if not isinstance(way_of(type(part)), Way) or _is_inert(part):
            return search
    search = search or _Search()
    search.at(part)
    return search
