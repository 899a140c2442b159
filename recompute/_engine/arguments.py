"""What an operation was given: its arguments, and what its function closes over or finds among its module's globals.

The values among the arguments are found, and their payloads filled in again for each run. Names are bound as they were
when the operation was made: `for power in range(50): rc.ap(lambda v: v * power, x)` makes fifty functions that share
one variable, and each must see again what it saw first. To what names were bound is remembered, not the content of
those objects.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable, Iterable, Iterator
from dis import get_instructions
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import ref

from recompute import _cython as cython
from recompute._adapters.adapter import FUNCTIONS, kinds
from recompute._engine.functions import Code, Facts, code_of, content, facts_of
from recompute._engine.graph import Operation, Value
from recompute._engine.sizes import constant, identity
from recompute._errors import ImpureError

if cython.compiled:
    import cython  # read by Cython, and never run
if not cython.compiled:

    def alike(copy: FunctionType, function: FunctionType) -> bool:  # compiled, it compares fields: see the .pxd
        """Whether a copy has all that the function has, but for cells of its own."""
        return (
            copy.__code__ is function.__code__
            and copy.__globals__ is function.__globals__
            and copy.__defaults__ is function.__defaults__
            and copy.__kwdefaults__ is function.__kwdefaults__
            and copy.__name__ is function.__name__
            and copy.__qualname__ is function.__qualname__
            and not function.__dict__
        )


class Outputs(tuple[Any, ...]):
    """What a function returned that was not asked how many outputs it would have."""

    __slots__ = ()


class Container:
    """A tuple, list or dict among the arguments, as it was: each run gets a fresh one with the payloads filled in."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.build = build
        self.parts = parts

    def fill(self, again: bool) -> Any:
        return self.build(fill(self.parts, again))


class Changeable:
    """A plain argument that may change: the first run gets it, and later ones what it was then."""

    __slots__ = ("again", "digest", "value")

    def __init__(self, value: Any, again: Callable[[], Any]) -> None:
        self.value = value
        self.again = again
        self.digest: bytes | None = None  # of all of it, if the cache verifies

    def fill(self, again: bool) -> Any:
        return self.again() if again else self.value


def fill(parts: Iterable[Any], again: bool = False) -> list[Any]:
    """The arguments with the payload instead of each value; `again`: as they were at the first run."""
    filled: list[Any] = []
    for part in parts:
        cls = type(part)
        filled.append(part.payload if cls is Value else part.fill(again) if cls in _FILLED else part)
    return filled


_FILLED: Final = frozenset({Container, Changeable})


def keywords_of(operation: Operation, again: bool = False) -> dict[str, Any]:
    """The arguments by name, with payloads filled in."""
    filled: dict[str, Any] = {}
    for name, part in (operation.keywords or filled).items():
        (filled[name],) = fill((part,), again)
    return filled


def changeable(operation: Operation) -> Iterator[tuple[str, Changeable]]:
    """The plain arguments that may change, with what they are called in an error."""
    named = [(f"argument {number}", part) for number, part in enumerate(operation.positional, 1)]
    named += [(f"argument {name!r}", part) for name, part in (operation.keywords or {}).items()]
    while named:
        name, part = named.pop(0)
        if type(part) is Container:
            named += [(f"a part of {name.removeprefix('a part of ')}", inner) for inner in part.parts]
        elif type(part) is Changeable:
            yield name, part


def as_they_were(operation: Operation) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a repeated run. Raises ImpureError, and names the argument, if one has changed."""
    try:
        return fill(operation.positional, True), keywords_of(operation, True)
    except ImpureError:
        for name, part in changeable(operation):
            try:
                part.again()
            except ImpureError as error:
                raise ImpureError(f"{name} of {operation.name} (created at {operation.created}) {error}") from None
        raise


_DEEPEST: Final = 500
"""Containers within each other."""


def pack(argument: Any, keep: list[Any], found: list[Value]) -> Any:
    """`argument` with its Recomputables replaced by their values; these are added to `found`, the former to `keep`.

    Tuples (named ones too), lists and dicts are copied, so what the caller does to them later does not matter.
    """
    try:
        return _pack(argument, keep, found, _DEEPEST)
    except RecursionError:
        raise ValueError(
            "an argument is nested too deeply, or contains itself; pass it as a value of its own"
        ) from None


def _pack(argument: Any, keep: list[Any], found: list[Value], depth: int) -> Any:
    if not depth:  # compiled code has no limit of its own
        raise RecursionError
    cls = type(argument)
    kind = kinds.of(cls)
    if kind.plain:
        return argument
    if kind.handle:
        keep.append(argument)
        value: Value = argument._node
        found.append(value)
        return value
    if cls is list:
        return Container(_same, [_pack(part, keep, found, depth - 1) for part in argument])
    if cls is dict:
        return Container(
            partial(_dict_of, tuple(argument)),
            [_pack(part, keep, found, depth - 1) for part in argument.values()],
        )
    if isinstance(argument, tuple):
        parts = [_pack(part, keep, found, depth - 1) for part in argument]
        if all(map(is_, parts, argument)):
            return argument  # nothing in it can change
        return Container(cls._make if hasattr(cls, "_make") else cls, parts)
    if kind.readonce:
        raise TypeError(
            f"an argument is a {cls.__name__}, which can be read only once, but an operation may run again; "
            "pass a list or a tuple instead"
        )
    if cls in FUNCTIONS:
        return bound(argument)
    again = None if kind.remember is None else kind.remember(argument)
    return argument if again is None else Changeable(argument, again)


def _same(parts: list[Any]) -> list[Any]:
    return parts


def _dict_of(keys: tuple[Any, ...], parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, parts, strict=True))


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
        made = _closed(function, facts) if facts.closed else function
        return _with_globals(made, names.read_globals) if names.read_globals else made
    if cls is partial:
        inner = bound(function.func)
        return function if inner is function.func else partial(inner, *function.args, **function.keywords)
    if cls in (MethodType, BuiltinFunctionType):
        kind = kinds.of(type(function.__self__))
        again = kind.remember(function.__self__) if kind.content and kind.remember is not None else None
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


_EMPTY: Final = object()
"""Instead of what a cell is bound to, if that is nothing."""


def _closed(function: FunctionType, facts: Facts) -> FunctionType:
    """A copy with cells of its own: the one of before, as long as nothing is bound to something else."""
    known = None if facts.copy is None else facts.copy()
    if known is None or not _sees_the_same(known, function, facts.code):
        known = _with_cells(function, {})
        facts.copy = ref(known)
    return known


def _sees_the_same(copy: FunctionType, function: FunctionType, code: Code) -> bool:
    if not alike(copy, function):
        return False
    own = _names_of(code).bound_here
    mine, theirs = copy.__closure__ or (), function.__closure__ or ()
    for number, name in enumerate(code.code.co_freevars):
        cell, other = mine[number], theirs[number]
        if cell is other:
            if name not in own and content(other, _EMPTY) is not _EMPTY:
                return False  # it was not bound then, and has no cell of its own
        elif content(other, _EMPTY) is _EMPTY or content(cell, _EMPTY) is not content(other, _EMPTY):
            return False  # also if it is a function that closes over something itself
    return True


def _with_cells(function: FunctionType, done: dict[FunctionType, FunctionType]) -> FunctionType:
    """A copy with cells of its own, where no name is rebound; but for those it binds itself."""
    closure = function.__closure__
    if closure is None:
        return function
    known = done.get(function)
    if known is not None:
        return known
    names = function.__code__.co_freevars
    own = _names_of(code_of(function.__code__)).bound_here
    cells = tuple(
        [
            cell if name in own or content(cell, _EMPTY) is _EMPTY else CellType()
            for name, cell in zip(names, closure, strict=True)
        ]
    )
    made = done[function] = _copy(function, cells, function.__globals__)
    for cell, copy in zip(closure, cells, strict=True):
        if copy is not cell:
            inside = cell.cell_contents
            copy.cell_contents = _with_cells(inside, done) if type(inside) is FunctionType else inside
    return made


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
