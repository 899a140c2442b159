"""Bindings: what a function closes over, or finds among its module's globals, as it was when the operation was made.

`for power in range(50): rc.ap(lambda v: v * power, x)` makes fifty functions that share one variable. Run again later,
each must see what it saw first. What is remembered is to what the names were bound, not the content of those objects.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable
from dis import get_instructions
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import WeakValueDictionary

from recompute._adapters.adapter import remember_plain
from recompute._engine.functions import Code, code_of, facts_of
from recompute._engine.sizes import constant, identity

_SHARED: Final = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
"""What a program mostly binds once: not remembered."""


def bound(function: Any) -> Any:
    """`function` with what its names are bound to now, and a plain `self` as it is now; itself, if nothing can change.

    An object of a class of the program's is shared: its methods, and itself if it is called, may keep counters there.
    """
    cls = type(function)
    if cls is FunctionType:
        facts = facts_of(function)
        names = _names_of(facts.code)
        made = _closed(function) if facts.closed else function
        return _with_globals(made, names.read_globals) if names.read_globals else made
    if cls is partial:
        inner = bound(function.func)
        return function if inner is function.func else partial(inner, *function.args, **function.keywords)
    if cls in (MethodType, BuiltinFunctionType):
        again = remember_plain(function.__self__)
        return function if again is None else Method(function, again)
    return function


class Method:
    """A method of a container or an array: later runs call it on what that was at the first."""

    __slots__ = ("__weakref__", "again", "func", "ran")

    def __init__(self, func: Any, again: Callable[[], Any]) -> None:
        self.func = func
        self.again = again
        self.ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ran:
            return getattr(self.again(), self.func.__name__)(*args, **kwargs)
        result = self.func(*args, **kwargs)
        self.ran = True
        return result

    def size_key(self) -> Hashable:
        """By what the sizes of its results are known, besides its arguments."""
        return identity(self.func)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)


class Seen:
    """A function, and what it saw under the names of its globals; run again, it sees the same."""

    __slots__ = ("__weakref__", "func", "values")

    def __init__(self, func: FunctionType, values: dict[str, Any]) -> None:
        self.func = func  # named as in functools.partial, so that it is known by the function's name
        self.values = values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        func, names = self.func, self.func.__globals__
        for name, value in self.values.items():
            if names.get(name, _SHARED) is not value:
                func = _copy(func, func.__closure__, {**names, **self.values})
                break
        return func(*args, **kwargs)

    def size_key(self) -> Hashable:
        """By what the sizes of its results are known, besides its arguments."""
        return identity(self.func), *map(constant, self.values.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)


def _closed(function: FunctionType) -> FunctionType:
    """A copy with cells of its own: the one of before, as long as nothing is bound to something else."""
    known = _copies.get(id(function))
    if known is not None and _sees_the_same(known, function):
        return known
    made = _copies[id(function)] = _with_cells(function, {})
    return made


_copies: Final[WeakValueDictionary[int, FunctionType]] = WeakValueDictionary()
"""By the identity of what was copied. That may be another function meanwhile, which the copy is compared with: it keeps
alive all that is compared, and so nothing that is the same has only taken its place."""


def _sees_the_same(copy: FunctionType, function: FunctionType) -> bool:
    if (
        copy.__code__ is not function.__code__
        or copy.__globals__ is not function.__globals__
        or copy.__defaults__ is not function.__defaults__
        or copy.__kwdefaults__ is not function.__kwdefaults__
        or (copy.__name__, copy.__qualname__) != (function.__name__, function.__qualname__)
        or function.__dict__
    ):
        return False
    own = _names_of(code_of(function.__code__)).bound_here
    names = function.__code__.co_freevars
    for name, cell, other in zip(names, copy.__closure__ or (), function.__closure__ or (), strict=True):
        if cell is other:
            if name not in own and not _unbound(other):
                return False  # it was not bound then, and has no cell of its own
        elif _unbound(other) or cell.cell_contents is not other.cell_contents:
            return False  # also if it is a function that closes over something itself
    return True


def _with_cells(function: FunctionType, done: dict[FunctionType, FunctionType]) -> FunctionType:
    """A copy with cells of its own, where nobody binds a name to something else; but for those it binds itself."""
    closure = function.__closure__
    if closure is None:
        return function
    known = done.get(function)
    if known is not None:
        return known
    names = function.__code__.co_freevars
    own = _names_of(code_of(function.__code__)).bound_here
    cells = tuple(
        [cell if name in own or _unbound(cell) else CellType() for name, cell in zip(names, closure, strict=True)]
    )
    made = done[function] = _copy(function, cells, function.__globals__)
    for cell, copy in zip(closure, cells, strict=True):
        if copy is not cell:
            content = cell.cell_contents
            copy.cell_contents = _with_cells(content, done) if type(content) is FunctionType else content
    return made


def _unbound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is _unbound
    except ValueError:
        return True


def _with_globals(function: FunctionType, names: tuple[str, ...]) -> Callable[..., Any]:
    found = function.__globals__
    values = {name: found[name] for name in names if name in found and not isinstance(found[name], _SHARED)}
    return Seen(function, values) if values else function


def _copy(function: FunctionType, cells: tuple[CellType, ...] | None, found: dict[str, Any]) -> FunctionType:
    made = FunctionType(function.__code__, found, function.__name__, function.__defaults__, cells)
    if function.__kwdefaults__ is not None:
        made.__kwdefaults__ = function.__kwdefaults__
    if function.__qualname__ != made.__qualname__:
        made.__qualname__ = function.__qualname__
    if function.__dict__:
        made.__dict__.update(function.__dict__)
    return made


class _Names:
    """Which names a piece of code binds, and which it reads among the globals; nested functions included."""

    __slots__ = ("bound_here", "read_globals")

    def __init__(self, code: CodeType) -> None:
        self.bound_here: set[str] = set()  # nonlocal names: a counter, and the like
        read: dict[str, None] = {}
        written: set[str] = set()
        nested = [code]
        while nested:
            inner = nested.pop()
            nested += [part for part in inner.co_consts if isinstance(part, CodeType)]
            for instruction in get_instructions(inner):
                name = instruction.argval
                if instruction.opname == "LOAD_GLOBAL":
                    read[name] = None
                elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                    written.add(name)
                elif instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and name in inner.co_freevars:
                    self.bound_here.add(name)
        self.read_globals = tuple(
            [name for name in read if name not in written and not hasattr(builtins, name) and not name.startswith("__")]
        )


def _names_of(code: Code) -> _Names:
    if code.names is None:
        code.names = _Names(code.code)
    names: _Names = code.names
    return names
