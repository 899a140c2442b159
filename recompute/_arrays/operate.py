"""One operation on arrays: operands to values, results to arrays.

A call is kept as it can be repeated, with the arrays taken out of it. A plain array that meets wrapped ones is one
source, as long as it is alive and unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final
from weakref import ReferenceType, ref

from recompute import extend
from recompute._adapters.adapter import FUNCTIONS, Adapter, kinds
from recompute._adapters.arrays import ArrayAdapter
from recompute._arrays.sharing import link
from recompute._cache import Cache
from recompute._errors import ImpureError
from recompute._recomputable import Recomputable
from recompute.extend import EVICTED, Outputs, Value, constant, identity
from recompute.text import warn

Wrap = type[Recomputable[Any]]
"""The class of arrays."""

SCALARS: Final = frozenset({int, float, complex, bool})
CONSTANTS: Final = SCALARS | {type(None), str}


class Operands:
    """The arguments of one call: arrays become values, what else there is stays where it stood."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.values: list[Value] = []
        self.handles: list[Recomputable[Any]] = []
        self._keep: list[Recomputable[Any]] = []  # new sources live until the operation refers to them
        self._adapter: Adapter | None = None

    def pack(self, argument: Any) -> Any:
        """The argument with holes instead of arrays; lists, dicts and plain arrays are copied."""
        cls = type(argument)
        if cls in CONSTANTS:
            return argument
        kind = kinds[cls]
        if kind.handle:
            extend.common_engine(self.cache._engine, argument)
            self._same_library(adapter_of(argument._node))
            self.values.append(argument._node)
            self.handles.append(argument)
            return HOLE
        adapter = kind.array
        if adapter is not None:
            if adapter.constant(argument):
                return argument
            self._same_library(adapter)
            adapter.check(argument)
            make = adapter.compact(argument)
            if make is not None:
                return Fresh(make)
            source = source_of(self.cache, adapter, argument)
            self._keep.append(source)
            self.values.append(source._node)
            return HOLE
        if cls is list:
            return [self.pack(part) for part in argument]
        if cls is dict:
            return {name: self.pack(part) for name, part in argument.items()}
        if cls is slice:
            return slice(self.pack(argument.start), self.pack(argument.stop), self.pack(argument.step))
        if isinstance(argument, tuple):
            return rebuilt(argument, [self.pack(part) for part in argument])
        if kind.readonce:
            raise TypeError(
                f"an argument is a {cls.__name__}, which can be read only once, but an operation may run again; "
                "pass a list or a tuple instead"
            )
        if cls in FUNCTIONS:
            return extend.bound(argument)
        again = None if kind.remember is None or cls is Fresh else kind.remember(argument)
        return argument if again is None else Fresh(again)

    def _same_library(self, adapter: Adapter | None) -> None:
        if self._adapter is None:
            self._adapter = adapter
        elif adapter is not None and adapter is not self._adapter:
            one, other = self._adapter.name, adapter.name
            raise TypeError(
                f"{one} and {other} arrays cannot be mixed; convert one of them first, for example with "
                f"rc.array({one}.asarray(x.get()))"
            )


def adapter_of(value: Value) -> Adapter | None:
    """Who serves the array that a value holds, or held before it was evicted; None: it is no array."""
    payload, remains = value.payload, value.remains
    if payload is EVICTED and remains is not None and remains.outline is not None:
        return kinds[remains.outline.cls].array
    return kinds[type(payload)].array


def same_library(values: list[Value]) -> bool:
    """Whether arrays that are in memory are of one library; False if that is not sure."""
    if len(values) < 2:
        return True
    adapter = kinds[type(values[0].payload)].array
    for value in values:  # no generator: this is on the hot path
        if kinds[type(value.payload)].array is not adapter:
            return False
    return adapter is not None


def call(
    wrap: Wrap,
    cache: Cache,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    caller: FrameType,
    *,
    nout: int = 0,
) -> Any:
    """`function` of arguments with arrays anywhere among them; results are wrapped, in whatever nest they come.

    `nout`: how many there are, if that is known.
    """
    positional: list[Any] = []
    plain: list[Value] = []
    for argument in args:  # mostly they are arrays of this cache and constants, and nothing is nested
        cls = type(argument)
        if cls is wrap and argument.cache is cache:
            value = argument._node
            plain.append(value)
            positional.append(value)
        elif cls in CONSTANTS:
            positional.append(argument)
        else:
            break
    else:
        if (not keywords or CONSTANTS.issuperset(map(type, keywords.values()))) and same_library(plain):
            repeated = function if nout and not keywords else Call(function, (), keywords, simple=True)
            return operate(wrap, cache, repeated, tuple(positional), tuple(plain), caller, nout, args)
    operands = Operands(cache)
    packed = tuple([operands.pack(argument) for argument in args])
    named = {name: operands.pack(argument) for name, argument in keywords.items()}
    values = tuple(operands.values)
    simple = len(values) == len(packed) and all(argument is HOLE for argument in packed) and "out" not in named
    return operate(
        wrap, cache, Call(function, packed, named, simple=simple), values, values, caller, nout, operands.handles
    )


def operate(
    wrap: Wrap,
    cache: Cache,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    values: tuple[Value, ...],
    caller: FrameType,
    nout: int = 1,
    operands: Sequence[Any] | None = None,
) -> Any:
    """`function` of values and constants, now; with `nout` 0 it is a `Call`, whose first run says how many outputs.

    `operands`: the arrays among the arguments, of which the result may be a view; None: it never is.
    """
    handles = cache.extend.run(function, positional, values, caller, nout=nout, handle=wrap._class_of_results)
    if operands is not None:
        for number, handle in enumerate(handles):
            if type(handle) is wrap and len(handle._node.storage.values) > 1:
                handles[number] = link(handle, operands, handles)
    if nout == 1:
        result = _given(handles[0])
    else:
        leaves = [_given(handle) for handle in handles]
        result = function.rebuild(leaves) if isinstance(function, Call) else tuple(leaves)
    kept = cache.extend.history_exceeded()
    if kept:
        _warn_of_history(kept)
    return result


def _given(handle: Recomputable[Any]) -> Any:
    """An array as it is wrapped, anything else plain: a number, a text, a dtype."""
    if type(handle) is not Recomputable:
        return handle
    handle.cache.extend.count_coercion()
    return handle.get()


def _warn_of_history(kept: int) -> None:
    warn(
        f"{kept:,} values without references are remembered, because later ones are made from them; if a "
        "loop carries values from step to step, cut their history at the end of each step: w = step(w).detach()",
        RuntimeWarning,
        stacklevel=4,
    )


class _Hole:
    """Stands where an array stood among the arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<array>"


HOLE: Final = _Hole()


class Fresh:
    """Stands for an argument that is made anew for each run: the memory of `out=`, or what might change meanwhile."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class Call:
    """`function` with arguments in which arrays are missing; called with the arrays, in their order.

    What it returns may be nested: then it is given as `Outputs` outputs, and `rebuild` has the nest again.
    """

    __slots__ = ("args", "func", "keywords", "simple", "structure")

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], *, simple: bool
    ) -> None:
        self.func = func  # named as in functools.partial, so that it is known by the function's name
        self.args = args  # with holes; none if it is simple
        self.keywords = keywords
        self.simple = simple  # it is called with all of its positional arguments
        self.structure: Any = None

    def __call__(self, *arrays: Any) -> Any:
        if self.simple:
            result = self.func(*arrays, **self.keywords)
        else:
            left = iter(arrays)
            result = self.func(
                *[_fill(argument, left) for argument in self.args],
                **{name: _fill(argument, left) for name, argument in self.keywords.items()},
            )
        if not isinstance(result, (tuple, list, dict)):
            return result
        leaves: list[Any] = []

        def take(leaf: Any) -> object:
            leaves.append(leaf)
            return _LEAF

        self.structure = _mapped(result, take)
        return Outputs(leaves) if len(leaves) > 1 else leaves[0] if leaves else None

    def size_key(self) -> Hashable:
        """By what the sizes of its results are known, besides the shapes of the arrays."""
        key = identity(self.func)
        if not self.simple:
            key = (key, *map(constant, self.args))
        if self.keywords:
            key = (key, *[(name, constant(argument)) for name, argument in self.keywords.items()])
        return key

    def rebuild(self, leaves: list[Any]) -> Any:
        """The nest that the function returned, with other leaves."""
        left = iter(leaves)
        return leaves[0] if self.structure is None else _mapped(self.structure, lambda _: next(left))


def _fill(part: Any, left: Iterator[Any]) -> Any:
    cls = type(part)
    if cls is _Hole:
        return next(left)
    if cls is list:
        return [_fill(inner, left) for inner in part]
    if cls is dict:
        return {name: _fill(inner, left) for name, inner in part.items()}
    if cls is slice:
        return slice(_fill(part.start, left), _fill(part.stop, left), _fill(part.step, left))
    if isinstance(part, tuple):
        return rebuilt(part, [_fill(inner, left) for inner in part])
    return _made(part) if cls is Fresh else part


def _made(part: Fresh) -> Any:
    try:
        return part.make()
    except ImpureError as error:
        raise ImpureError(f"an argument {error}") from None


def rebuilt(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """A tuple of the same type, named ones too."""
    cls = type(like)
    return cls._make(parts) if hasattr(cls, "_make") else cls(parts)


_LEAF: Final = object()


def _mapped(nest: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts, with `leaf` of everything else, in order."""
    if isinstance(nest, tuple):
        return rebuilt(nest, [_mapped(part, leaf) for part in nest])
    if type(nest) is list:
        return [_mapped(part, leaf) for part in nest]
    if type(nest) is dict:
        return {name: _mapped(part, leaf) for name, part in nest.items()}
    return leaf(nest)


class _Known:
    """A source that was made of an array, and what tells that this array is still the same."""

    __slots__ = ("node", "owner")

    def __init__(self, owner: ReferenceType[Any], node: Value) -> None:
        self.owner = owner
        """Of its memory, which the array may be a view of."""
        self.node = node


def source_of(cache: Cache, adapter: ArrayAdapter, array: Any) -> Recomputable[Any]:
    """A source with the content of a plain array.

    It is the one that was made before of the same memory, if an operation needs that still and the content is the same
    to the last bit: O(bytes) to see, which is no more than the copy that another source would take.
    """
    place = adapter.place(array)
    owner = adapter.buffer(array)
    if place is None or owner is None:
        return cache.extend.source(adapter.snapshot(array), Recomputable)
    sources: dict[Hashable, _Known] = cache.__dict__.setdefault("_plain", {})
    key = id(owner), place
    known = sources.get(key)
    if known is not None and known.owner() is owner:
        payload = known.node.payload
        if payload is not EVICTED and adapter.same(array, payload):
            del payload
            handle = cache.extend.refer(known.node, Recomputable)
            if handle is not None:
                return handle

    def gone(_: object) -> None:
        if sources.get(key) is known:
            sources.pop(key, None)

    source = cache.extend.source(adapter.snapshot(array), Recomputable)
    with suppress(TypeError):  # its memory belongs to something that cannot be watched
        known = sources[key] = _Known(ref(owner, gone), source._node)
    return source
