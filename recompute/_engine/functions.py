"""What is known of a function of Python: found once for each of them, since to ask a function for its parts takes long.

A function whose code is replaced later is known as it was first seen.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    __slots__ = ("code", "meanings", "names", "silent")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.names: Any = None
        """What it binds and reads, as `arguments` has it; None: not looked at yet."""
        self.silent = 0
        """Identity of the globals with which it is known to reach no random numbers by name; 0: of none."""
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


def is_silent(code: Code, home: dict[str, Any]) -> bool:
    """Whether code is known to reach no random numbers by name, with these globals as they are now."""
    return code.silent == id(home) and mean_the_same(code.meanings, home)


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
