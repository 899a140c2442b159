"""One operation on arrays: operands to values, results to arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from recompute._adapters.adapter import Adapter, kinds
from recompute._arrays.call import HOLE, Call, Fresh, rebuilt
from recompute._cache import Cache
from recompute._engine.graph import EVICTED, Operation, Value
from recompute._recomputable import Recomputable, common_cache

Wrap = Callable[[Cache, Value], Recomputable[Any]]
"""What makes an array of a value."""

SCALARS: Final = frozenset({int, float, complex, bool})
CONSTANTS: Final = SCALARS | {type(None), str}


class Operands:
    """The arguments of one call: arrays become values, what else there is stays where it stood."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.values: list[Value] = []
        self._keep: list[Recomputable[Any]] = []  # new sources live until the operation refers to them
        self._adapter: Adapter | None = None

    def pack(self, argument: Any) -> Any:
        """The argument with holes in the place of arrays; lists, dicts and plain arrays are copied."""
        cls = type(argument)
        if cls in CONSTANTS:
            return argument
        value = getattr(argument, "_value", None)
        if type(value) is Value:
            common_cache(self.cache, argument)
            self._same_library(adapter_of(value))
            self.values.append(value)
            return HOLE
        kind = kinds[cls]
        adapter = kind.array
        if adapter is not None:
            if adapter.constant(argument):
                return argument
            self._same_library(adapter)
            adapter.check(argument)
            make = adapter.compact(argument)
            if make is not None:
                return Fresh(make)
            source: Recomputable[Any] = Recomputable(self.cache, self.cache._add_source(adapter.snapshot(argument)))
            self._keep.append(source)
            self.values.append(source._value)
            return HOLE
        if cls is list:
            return [self.pack(each) for each in argument]
        if cls is dict:
            return {name: self.pack(each) for name, each in argument.items()}
        if cls is slice:
            return slice(self.pack(argument.start), self.pack(argument.stop), self.pack(argument.step))
        if isinstance(argument, tuple):
            return rebuilt(argument, [self.pack(each) for each in argument])
        if kind.readonce:
            raise TypeError(
                f"an argument is a {cls.__name__}, which can be read only once, but an operation may run again; "
                "pass a list or a tuple instead"
            )
        return argument

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
    payload = value.payload
    cls = value.outline.cls if payload is EVICTED and hasattr(value, "outline") else type(payload)
    return kinds[cls].array


def same_library(values: list[Value]) -> bool:
    """Whether arrays that are in memory are of one library; False if that is not sure."""
    if len(values) < 2:
        return True
    adapter = kinds[type(values[0].payload)].array
    for each in values:  # no generator: this is on the hot path
        if kinds[type(each.payload)].array is not adapter:
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
    for each in args:  # mostly they are arrays of this cache and constants, and nothing is nested
        cls = type(each)
        if cls is wrap and each._cache is cache:
            value = each._value
            plain.append(value)
            positional.append(value)
        elif cls in CONSTANTS:
            positional.append(each)
        else:
            break
    else:
        if (not keywords or CONSTANTS.issuperset(map(type, keywords.values()))) and same_library(plain):
            repeated = Call(function, (), keywords, True)
            return operate(wrap, cache, repeated, tuple(positional), tuple(plain), caller, 0)
    operands = Operands(cache)
    packed = tuple([operands.pack(each) for each in args])
    named = {name: operands.pack(each) for name, each in keywords.items()}
    values = tuple(operands.values)
    simple = len(values) == len(packed) and all(each is HOLE for each in packed) and "out" not in named
    return operate(wrap, cache, Call(function, packed, named, simple), values, values, caller, 0)


def operate(
    wrap: Wrap,
    cache: Cache,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    values: tuple[Value, ...],
    caller: FrameType,
    nout: int = 1,
) -> Any:
    """`function` of values and constants, now; with `nout` 0 it is a `Call`, whose first run says how many outputs."""
    operation = Operation(function, positional, None, values, nout, None, caller.f_code, caller.f_lasti)
    with cache._settling:
        value = cache._apply_at_once(operation)
        if value is None:
            cache._apply(operation)
        outputs = operation.outputs
        if nout and len(outputs) == 1 and (value := outputs[0]) is not None:
            array = kinds[type(value.payload)].array  # mostly it is one
            result = _given(_handle(wrap, cache, value)) if array is None else wrap(cache, value)
        else:
            handles = [_handle(wrap, cache, each) for each in outputs if each is not None]  # before one of them raises
            leaves = [_given(each) for each in handles]
            result = function.rebuild(leaves) if isinstance(function, Call) else tuple(leaves)
    if cache._history > cache._history_limit:
        _warn_of_history(cache)
    return result


def _handle(wrap: Wrap, cache: Cache, value: Value) -> Recomputable[Any]:
    """What refers to a result: a wrapped array if it is an array."""
    payload = value.payload
    array = hasattr(value, "outline") if payload is EVICTED else kinds[type(payload)].array
    return wrap(cache, value) if array else Recomputable(cache, value)


def _given(handle: Recomputable[Any]) -> Any:
    """An array as it is wrapped, anything else plain: a number, a text, a dtype."""
    if type(handle) is not Recomputable:
        return handle
    handle._cache._coercions += 1
    return handle.get()


def _warn_of_history(cache: Cache) -> None:
    kept = cache._history
    cache._history_limit = 10 * kept
    warnings.warn(
        f"{kept:,} values that nobody refers to any more are remembered, because later ones are made from them; if a "
        "loop carries values from step to step, cut their history at the end of each step: w = step(w).detach()",
        RuntimeWarning,
        stacklevel=4,
    )
