"""What a function can draw random numbers from, as far as the names in its code tell.

What a piece of code names (globals, attributes of these, modules that it imports) is read once, and what the names lead
to is found once, as long as they mean the same.
"""

from __future__ import annotations

import builtins
import sys
from collections import deque
from collections.abc import Iterator
from dis import get_instructions
from enum import Enum
from functools import partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, ref

from recompute._adapters.adapter import Adapter, generators_for, kinds
from recompute._adapters.generators import Generators
from recompute._adapters.sizes import ATOMIC
from recompute._engine.arguments import Changeable, Container, Method, Seen
from recompute._engine.functions import Meaning, content, mean_the_same
from recompute._engine.graph import Value

_OF_A_PROGRAM: Final = 1 << 9
"""A flag of types that are made at run time, by class statements mostly."""

_FUNCTIONS: Final = 256
"""That are followed by name from one function."""

PARTS: Final = 64
"""Attributes that are looked at of one object; of a container an eighth of them."""

_MOST: Final = 4096
"""Entries that are remembered; of what code names, all are forgotten when there are more."""


class Found(NamedTuple):
    """A generator that an operation could draw from."""

    generator: Any
    by: Generators
    result: bool
    """Whether it is part of a value that may be evicted, so that its state may go."""


# How to look at an object, by its type


class Way(Enum):
    NOTHING = 0
    FUNCTION = 1
    METHOD = 2
    PARTIAL = 3
    WRAPPED = 4
    CONTAINER = 5
    INSTANCE = 6


NOTHING, FUNCTION, METHOD, PARTIAL, WRAPPED, CONTAINER, INSTANCE = Way  # Python looks members up for a microsecond

CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)

ways: Final[dict[type, Way | Generators]] = {
    **dict.fromkeys(ATOMIC, NOTHING),
    FunctionType: FUNCTION,
    MethodType: METHOD,
    BuiltinFunctionType: METHOD,
    partial: PARTIAL,
    Method: WRAPPED,
    Seen: WRAPPED,
    Value: NOTHING,
    **dict.fromkeys(CONTAINERS, CONTAINER),
}


def way_of(cls: type) -> Way | Generators:
    way = ways.get(cls)
    if way is None:
        way = _resolve(cls)
        if len(ways) >= _MOST:
            return way
        ways[cls] = way
    return way


def is_inert(cls: type) -> bool:
    """Whether there is nothing to look at in an object of a class."""
    return cls is not Container and cls is not Changeable and way_of(cls) is NOTHING


def _resolve(cls: type) -> Way | Generators:
    for base in cls.__mro__[:-1]:
        generators = generators_for(base.__module__.partition(".")[0])
        if generators is not None and generators.serves(cls):
            return generators
    if issubclass(cls, CONTAINERS):
        return CONTAINER
    if getattr(cls, "keeps_states", False) is True:
        return NOTHING  # a function of an adapter that restores its generators itself
    kind = kinds[cls]
    package = cls.__module__.partition(".")[0]
    own = kind.handle or package == "recompute" or package in sys.stdlib_module_names
    if cls is SimpleNamespace:
        return INSTANCE
    if own or issubclass(cls, (type, ModuleType)) or type(kind.adapter) is not Adapter:
        return NOTHING  # the library's own, Python's own, and a framework's
    if not cls.__flags__ & _OF_A_PROGRAM:
        return NOTHING
    return INSTANCE if cls.__dictoffset__ or hasattr(cls, "__slots__") else NOTHING


def members_of(cls: type) -> tuple[Any, ...]:
    """The descriptors of what an object has: first that of its dict, then those of its slots. None runs code of it."""
    members = _members.get(cls)
    if members is None:
        members = (*islice(_dicts(cls), 1), *_slots(cls))
        if len(_members) < _MOST:
            _members[cls] = members
    return members


_members: Final[dict[type, tuple[Any, ...]]] = {}
_BUILT_IN: Final = (GetSetDescriptorType, MemberDescriptorType)


def _dicts(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if type(base.__dict__.get("__dict__")) in _BUILT_IN:
            yield base.__dict__["__dict__"]


def _slots(cls: type) -> Iterator[Any]:
    for base in cls.__mro__[:-1]:
        names = base.__dict__.get("__slots__", ())
        for name in islice((names,) if isinstance(names, str) else names, PARTS):
            private = name[:2] == "__" and name[-2:] != "__"
            member = base.__dict__.get(f"_{base.__name__.lstrip('_')}{name}" if private else name)
            if type(member) in _BUILT_IN and name not in ("__dict__", "__weakref__"):
                yield member


# What a function can reach by name


class Reach:
    """What a function and the functions that it calls by name can draw from, as far as that does not change.

    It keeps nothing alive but modules: objects are found again, by their names, for each operation.
    """

    __slots__ = ("_home", "_owner", "attributes", "chains", "helpers", "imported", "meanings", "sources")

    def __init__(self, function: FunctionType, owner: type | None) -> None:
        self._home = id(function.__globals__)
        self._owner = None if owner is None else ref(owner)
        self.meanings: list[Meaning] = []
        """What names in the globals must mean for all this to hold: functions that it calls, and built-in ones."""
        self.sources: list[Found] = []
        """Generators behind the functions of modules."""
        self.chains: list[Chain] = []
        """From the globals of the function, to objects that are looked at for each operation."""
        self.imported: list[Chain] = []
        """The same from modules that code imports itself."""
        self.attributes: list[tuple[ReferenceType[type], str]] = []
        """The same of classes, whose methods are called."""
        self.helpers: list[tuple[ReferenceType[FunctionType], tuple[Chain, ...]]] = []
        """Functions that are called, with their chains; what they close over is looked at, too."""

    def calls(self, chain: Chain, end: Any) -> None:
        if len(chain) == 1 and type(end) is FunctionType:
            self.meanings.append((chain[0], ref(end)))

    def holds(self, function: FunctionType, owner: type | None) -> bool:
        home = function.__globals__
        if self._home != id(home) or (None if self._owner is None else self._owner()) is not owner:
            return False
        return mean_the_same(self.meanings, home)

    @property
    def empty(self) -> bool:
        return not (self.sources or self.chains or self.imported or self.attributes or self.helpers)


def reach_of(function: FunctionType, owner: type | None) -> Reach:
    """Found once for the code, as long as the names of the functions that it calls mean the same."""
    key = function.__code__, id(owner)
    reach = _reaches.get(key)
    if reach is None or not reach.holds(function, owner):
        if len(_reaches) >= _MOST:
            _reaches.clear()
        reach = _reaches[key] = _follow(function, owner)
    return reach


_reaches: Final[dict[tuple[CodeType, int], Reach]] = {}


def _follow(function: FunctionType, owner: type | None) -> Reach:
    reach = Reach(function, owner)
    functions: list[tuple[FunctionType, type | None]] = [(function, owner)]
    seen = {function.__code__}
    for current, cls in functions:  # it grows
        names = named_by(current.__code__)
        variable: list[Chain] = []
        ends: list[Any] = []
        for chain in names.chains:
            end, length = resolved(current.__globals__, chain)
            ends.append(end)
            if current is function:
                reach.calls(chain, end)
            if length < len(chain):  # a method of an object
                part = attribute(type(end), chain[length])
                ends.append(MethodType(part, _Of(type(end))) if type(part) is FunctionType else part)
            if end is _MISSING and current.__globals__ is function.__globals__ and _is_built_in(chain[0]):
                reach.meanings.append((chain[0], None))
            elif _may_vary(end):
                variable.append(chain[:length])
        for chain in names.imported:
            end, length = resolved(sys.modules, chain)
            ends.append(end)
            if _may_vary(end):
                reach.imported.append(chain[:length])
        if cls is not None:
            ends += _own(cls, names, reach)
        if current is function:
            reach.chains = variable
        else:
            parts = [*[content(cell, None) for cell in current.__closure__ or ()], *defaults_of(current)]
            ends += parts
            if variable or any(part is None or _may_vary(part) for part in parts):
                reach.helpers.append((ref(current), tuple(variable)))
        for end in ends:
            source = source_of(end) if issubclass(type(end), (ModuleType, BuiltinFunctionType)) else None
            if source is not None:
                reach.sources.append(source)
            for inner, of in _code_of(end):
                if inner.__code__ not in seen and len(functions) < _FUNCTIONS:
                    seen.add(inner.__code__)
                    functions.append((inner, of))
    return reach


def _may_vary(end: Any) -> bool:
    """Whether what a name leads to now has to be looked at for each operation."""
    cls = type(end)
    if cls is FunctionType or issubclass(type(end), (ModuleType, type)):
        return False
    if cls is BuiltinFunctionType:
        return end.__self__ is not None and not issubclass(type(end.__self__), ModuleType)
    return end is None or end is _MISSING or way_of(cls) is not NOTHING


def _is_built_in(name: str) -> bool:
    return not _may_vary(vars(builtins).get(name))


_MISSING: Final = object()


def resolved(home: Any, chain: Chain) -> tuple[Any, int]:
    """Where a chain leads through modules and classes, and how many of its names that takes."""
    end = home.get(chain[0], _MISSING)
    for length, name in enumerate(chain[1:], 1):
        if issubclass(type(end), ModuleType):
            end = end.__dict__.get(name, _MISSING)
        elif issubclass(type(end), type):
            end = attribute(end, name)
        else:
            return end, length
    return end, len(chain)


def attribute(cls: type, name: str) -> Any:
    """As it stands in the class, without the descriptors' part."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _MISSING


def _own(cls: type, names: Named, reach: Reach) -> Iterator[Any]:
    """What a method can reach of its class: other methods, and what the class has."""
    for name in names.attributes:
        part = attribute(cls, name)
        if isinstance(part, (staticmethod, classmethod)):
            part = part.__func__
        elif isinstance(part, property):
            part = part.fget
        if type(part) is FunctionType:
            yield MethodType(part, _Of(cls))
        elif part is not _MISSING and _may_vary(part):
            reach.attributes.append((ref(cls), name))


class _Of(NamedTuple):
    """Instead of an instance: a method's class."""

    cls: type


def _code_of(end: Any) -> Iterator[tuple[FunctionType, type | None]]:
    """The functions that a call of this would run, each with the class of its instance."""
    if isinstance(end, (staticmethod, classmethod)):
        end = end.__func__
    if type(end) is FunctionType:
        yield end, None
    elif type(end) is MethodType:
        of: Any = end.__self__
        inner = end.__func__
        if type(inner) is FunctionType:
            yield inner, of.cls if type(of) is _Of else of if issubclass(type(of), type) else type(of)
    elif isinstance(end, partial):
        yield from _code_of(end.func)
    elif issubclass(type(end), type):
        made = attribute(end, "__init__")
        if type(made) is FunctionType:
            yield made, end
    else:
        wrapped = getattr(end, "__wrapped__", None) if type(end).__module__ == "functools" else None
        called = attribute(type(end), "__call__")
        if type(wrapped) is FunctionType:
            yield wrapped, None
        elif type(called) is FunctionType:
            yield called, type(end)


def source_of(of: ModuleType | BuiltinFunctionType) -> Found | None:
    """The generator behind the functions of a module, if that is what the module is for, or behind one of them."""
    name = of.__name__ if isinstance(of, ModuleType) else of.__module__ or ""
    generators = generators_for(name.partition(".")[0])
    generator = None if generators is None else generators.of_module(name)
    return None if generators is None or generator is None else Found(generator, generators, False)


def defaults_of(function: FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


Chain = tuple[str, ...]
"""A global name, and attributes one after another: `("np", "random", "rand")`."""


class Named(NamedTuple):
    """Of one piece of code, with the functions that it defines."""

    chains: tuple[Chain, ...]
    """From names among the globals."""
    imported: tuple[Chain, ...]
    """From modules that the code imports itself, whose full names come first."""
    attributes: frozenset[str]
    """All names of attributes, of whatever object."""


def named_by(code: CodeType) -> Named:
    """O(instructions) the first time."""
    known = _known.get(code)
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        known = _known[code] = _read(code)
    return known


_known: Final[dict[CodeType, Named]] = {}
_BETWEEN: Final = frozenset({"PUSH_NULL", "CACHE", "EXTENDED_ARG", "PRECALL", "COPY_FREE_VARS", "NOP"})


def _read(code: CodeType) -> Named:
    chains: dict[Chain, None] = {}
    imported: dict[Chain, None] = {}
    attributes: set[str] = set()
    local: dict[str, Chain] = {}
    """Names that the code binds to what it imports."""
    parts = [code]
    for part in parts:  # it grows
        parts += [inner for inner in part.co_consts if isinstance(inner, CodeType)]
        chain: Chain = ()
        into = chains
        module = ""
        bound: Chain = ()
        for instruction in get_instructions(part):
            what, name = instruction.opname, instruction.argval
            if what in _BETWEEN:
                continue
            if what in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(name)
                chain = (*chain, name) if chain else ()
                continue
            if chain:
                into[chain] = None
            chain, into = (), chains
            if what in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = (name,)
            elif what == "IMPORT_NAME":
                module, bound = name, (name.partition(".")[0],)
            elif what == "IMPORT_FROM":
                bound = (module, name)
            elif "_FAST" in what or "_DEREF" in what or what == "STORE_NAME":
                names = name if isinstance(name, tuple) else (name,)  # two in one instruction, since Python 3.13
                if what.startswith("STORE_") and bound:
                    local.setdefault(names[0], bound)
                    bound = ()
                if "LOAD_" in what and names[-1] in local:
                    chain, into = local[names[-1]], imported
        if chain:
            into[chain] = None
    return Named(tuple(chains), tuple(imported), frozenset(attributes))
