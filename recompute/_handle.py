"""Handles: what refers to a value of a cache, and `ap`, which makes them. Compiled, since every use passes here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import is_finalizing
from threading import current_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from recompute._adapters.adapter import kinds
from recompute._adapters.result_sizes import MOST_BYTES
from recompute._context import current_cache, is_default
from recompute._engine.arguments import bound, pack
from recompute._engine.frames import HandleOf
from recompute._engine.graph import EVICTED, Operation, Options, Value
from recompute._engine.requests import apply
from recompute._engine.requests import get as get_slowly

if TYPE_CHECKING:
    from collections.abc import Callable

    from recompute._cache import Cache
    from recompute._engine.engine import Engine

_NO_NAMES: Final[Mapping[str, Any]] = {}


class Handle:
    """A reference to a value of a cache, from outside."""

    __slots__ = ("__weakref__", "_engine", "_node")
    _engine: Engine
    _node: Value
    """What it refers to, for `recompute.extend`."""

    def __del__(self) -> None:
        try:
            self._engine.settling.going(self, self._node)
        except RecursionError:
            return  # there is no room for it on this stack: the next use of the cache does what is left
        except BaseException as error:
            if is_finalizing is None or is_finalizing():  # the first: this module is being cleared
                return
            if getattr(self, "_node", None) is not None:  # else it was interrupted while it was made
                self._engine.finalizer.note_interrupt(error)

    def get(self) -> Any:
        """The value; recomputed, with everything it needs, if it was evicted.

        Inside an operation's function, the value becomes a dependency of the operation. O(1) while resident. Raises
        BudgetError if the recomputation does not fit, and whatever the functions raise.
        """
        value = self._node
        payload = value.payload
        engine = self._engine
        if payload is EVICTED or engine.watchful:
            return get_slowly(engine, value)
        engine.reads += 1
        value.storage.last_access = engine.meter.now
        return payload


def apply_at(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nout: int,
    nbytes: int | Sequence[int] | None,
    caller: FrameType,
    like: HandleOf,
) -> Any:
    """`ap` of what `caller` gave: tracebacks of a repeated run name the line that it is at.

    `like`: the class of what refers to the results, unless an argument has another one, which decides then.
    """
    plain = like
    if kinds.of(type(function)).handle:
        args = (function, *args)
        function = _call
    elif not callable(function):
        raise TypeError(f"ap takes a function first, or a Recomputable that holds one, not {function!r}")
    else:
        function = bound(function)
    keep: list[Any] | None = None  # references that live in a list which may change meanwhile
    found: list[Value] = []
    positional: list[Any] | None = None  # None: Recomputables and nothing else
    engine: Engine | None = None
    for argument in args:
        kind = kinds.of(type(argument))
        if kind.handle:  # mostly
            handle = argument
            if handle._engine is not engine:
                engine = handle._engine if engine is None else common_engine(engine, handle, args)
            if type(argument) is not plain:
                like = type(argument)._class_of_results
            argument = handle._node
            found.append(argument)
        else:
            if positional is None:
                positional = list(found)
            if not kind.plain:
                keep = [] if keep is None else keep
                argument = pack(argument, keep, found)
        if positional is not None:
            positional.append(argument)
    keywords = None
    if kwargs:
        positional = list(found) if positional is None else positional
        keep = [] if keep is None else keep
        keywords = {name: pack(argument, keep, found) for name, argument in kwargs.items()}
    if keep:
        for handle in keep:
            engine = common_engine(engine, handle, args, kwargs)
        if like is plain:
            like = class_of_results(keep, plain)
    arguments = tuple(found)
    options = None
    if type(nout) is not int or nout != 1 or nbytes is not None or keywords:
        options = Options(keywords, nout, _declared(nout, nbytes))
    operation = Operation(
        function,
        arguments if positional is None else tuple(positional),
        arguments,
        caller.f_code,
        caller.f_lasti,
        options,
    )
    handles = apply(engine or current_cache()._engine, operation, like)
    return handles[0] if options is None or options.nout == 1 else tuple(handles)


def class_of_results(arguments: Sequence[Any], plain: HandleOf) -> HandleOf:
    """Of what refers to a result: a subclass of Recomputable, the `plain` one, says itself what its instances make."""
    for handle in arguments:
        if type(handle) is not plain:
            return type(handle)._class_of_results  # type: ignore[no-any-return]  # as Recomputable has it
    return plain


def common_engine(
    engine: Engine | None, argument: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_NAMES
) -> Engine:
    """The engine of `argument`; raises ValueError if that is not `engine`, and says which of all arguments it is."""
    if engine is not None and argument._engine is not engine:
        which = [f"argument {number}" for number, one in enumerate(args, 1) if one is argument]
        which += [f"argument {name!r}" for name, one in kwargs.items() if one is argument]
        raise ValueError(
            f"the arguments belong to two caches: {(which or ['one of them'])[0]} to "
            f"{_named(argument.cache)}, the others to {_named(engine.cache)}, in thread {current_thread().name!r} (a "
            "new thread starts in the default cache); make all of them within one `with cache:`, or pass the value: "
            "argument.get()"
        )
    return argument._engine  # type: ignore[no-any-return]  # a Recomputable has one


def _named(cache: Cache) -> str:
    return "the default cache" if is_default(cache) else repr(cache)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _declared(nout: int, nbytes: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if type(nout) is not int or nout < 1:
        raise ValueError(f"nout must be a whole number of outputs, at least 1, not {nout!r}")
    if nbytes is None:
        return None
    if type(nbytes) is int and 0 <= nbytes <= MOST_BYTES:
        return (nbytes,) * nout
    sizes = tuple(nbytes) if isinstance(nbytes, Sequence) else (nbytes,) * nout
    if len(sizes) != nout or not all(hasattr(size, "__index__") and 0 <= size <= MOST_BYTES for size in sizes):
        raise ValueError(f"nbytes must be bytes, 0 to 2**60: one number, or {nout} of them, not {nbytes!r}")
    return tuple(size.__index__() for size in sizes)
