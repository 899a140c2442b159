"""What is known of a function of Python: found once for each of them, since to ask a function for its parts takes long.

A function whose code is replaced later is known as it was first seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import wraps
from types import CellType, CodeType, FunctionType
from typing import Any, Final
from weakref import ReferenceType, ref

from recompute import _cython as cython

if cython.compiled:
    import cython  # read by Cython, and never run
if not cython.compiled:

    def refers_to(reference: ReferenceType[FunctionType], function: FunctionType) -> bool:  # compiled: see the .pxd
        return reference() is function


Meaning = tuple[str, ReferenceType[FunctionType] | None]
"""A name among globals, and the function that it means there; None: nothing, but something that is built in."""

_MOST: Final = 4096  # entries; all are forgotten when there are more


class Code:
    """Of a piece of code, and what stands for it in keys: its hash takes no look at the code."""

    __slots__ = ("code", "meanings", "names", "owner", "silent")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.names: Any = None
        """What it binds and reads, as `arguments` has it; None: not looked at yet."""
        self.silent = 0
        """Identity of the globals with which it is known to reach no random numbers by name; 0: of none."""
        self.owner: ReferenceType[type] | None = None
        """As a method of this class; None: as a function."""
        self.meanings: tuple[Meaning, ...] = ()
        """As long as names have these meanings there."""


class Facts:
    """Of a function."""

    __slots__ = ("bare", "closed", "code", "copy", "reference")

    def __init__(self, function: FunctionType) -> None:
        self.reference = ref(function)
        self.code = code_of(function.__code__)
        self.closed = function.__closure__ is not None
        """Whether it closes over something."""
        self.bare = not self.closed and function.__defaults__ is None and function.__kwdefaults__ is None
        """Whether it has nothing but its code and its globals."""
        self.copy: ReferenceType[FunctionType] | None = None
        """The newest copy of it that has cells of its own, or of a function that had its identity before."""


def facts_of(function: FunctionType) -> Facts:
    global _newest
    known = _newest
    if known is not None and refers_to(known.reference, function):  # asked for three times for each operation
        return known
    known = _facts.get(id(function))
    if known is None or not refers_to(known.reference, function):
        copy = None if known is None else known.copy
        known = Facts(function)
        known.copy = copy
        if len(_facts) >= _MOST:
            _facts.clear()
        _facts[id(function)] = known
    _newest = known
    return known


_newest: Facts | None = None
"""Those that were asked for last."""

_facts: Final[dict[int, Facts]] = {}
"""By identity, which is that of another function by now if the weak reference says so."""


def mean_the_same(meanings: Iterable[Meaning], home: dict[str, Any]) -> bool:
    """Whether names still mean the same among these globals."""
    for name, meant in meanings:
        if home.get(name) is not (None if meant is None else meant()):
            return False
    return True


def is_silent(code: Code, owner: type | None, home: dict[str, Any]) -> bool:
    """Whether code is known to reach no random numbers by name, with these globals as they are now.

    `owner`: the class of which it is a method; None: of none.
    """
    known = None if code.owner is None else code.owner()
    return code.silent == id(home) and known is owner and mean_the_same(code.meanings, home)


def code_of(code: CodeType) -> Code:
    known = _codes.get(id(code))
    if known is None:
        if len(_codes) >= _MOST:
            _codes.clear()
        known = _codes[id(code)] = Code(code)
    return known


_codes: Final[dict[int, Code]] = {}
"""By identity; the code is kept, so that no other one takes it."""


def content(cell: CellType, empty: Any) -> Any:
    """What a cell is bound to; `empty` if to nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


def initializer(init: Any) -> Any:
    """In place of the `__init__` of a frozen dataclass; compiled, no signal is looked for as it runs."""
    names = init.__code__.co_varnames[1 : init.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(init.__defaults__ or ()), strict=False))
    put = object.__setattr__

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        count = len(given)
        if count > len(names) or not named.keys() <= set(names[count:]):
            raise TypeError(f"{type(self).__name__} takes {', '.join(names)}, each once")
        for place, name in enumerate(names):
            if place < count:
                put(self, name, given[place])
            elif name in named:
                put(self, name, named[name])
            elif name in defaults:
                put(self, name, defaults[name])
            else:
                raise TypeError(f"{type(self).__name__} needs {name}")

    return wraps(init)(__init__)


_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ADAPTER: Final = re.compile(r"[/\\]recompute_[a-z]+[/\\]")

_places: Final[dict[tuple[int, int], tuple[CodeType, str]]] = {}  # the code is kept, so that its identity stays its own


def line_of(code: CodeType, instruction: int) -> int:
    """The line that an instruction belongs to."""
    lines = [line for start, _, line in code.co_lines() if line is not None and start <= instruction]
    return lines[-1] if lines else code.co_firstlineno


def place_of(code: CodeType | None, instruction: int) -> str:
    """`file:line`; empty if it is not known, or in this library or an adapter: the user has no such line."""
    if code is None:
        return ""
    key = id(code), instruction
    known = _places.get(key)
    if known is None:
        if len(_places) >= _MOST:
            _places.clear()
        name = code.co_filename
        ours = name.startswith(_OURS) or _ADAPTER.search(name) is not None
        known = _places[key] = code, "" if ours or name == "<trace>" else f"{name}:{line_of(code, instruction)}"
    return known[1]
