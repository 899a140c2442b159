"""One operation on arrays: operands to values, results to arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from recompute import extend
from recompute._adapters.adapter import FUNCTIONS, Adapter, kinds
from recompute._arrays.call import HOLE, Call, Fresh, rebuilt
from recompute._arrays.plain import source_of
from recompute._arrays.sharing import link
from recompute._cache import Cache
from recompute._recomputable import Recomputable
from recompute.extend import EVICTED, Value
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
) -> Any:
    """`function` of arguments with arrays anywhere among them; results are wrapped, in whatever nest they come."""
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
            repeated = Call(function, (), keywords, simple=True)
            return operate(wrap, cache, repeated, tuple(positional), tuple(plain), caller, 0, args)
    operands = Operands(cache)
    packed = tuple([operands.pack(argument) for argument in args])
    named = {name: operands.pack(argument) for name, argument in keywords.items()}
    values = tuple(operands.values)
    simple = len(values) == len(packed) and all(argument is HOLE for argument in packed) and "out" not in named
    return operate(
        wrap, cache, Call(function, packed, named, simple=simple), values, values, caller, 0, operands.handles
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
            if handle._node.storage is not handle._node and type(handle) is wrap:
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
