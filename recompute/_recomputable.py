"""The surface: `Recomputable`, a value that may be dropped and recomputed; `pure` and `ap` make them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from threading import current_thread, get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TypeVar, overload

from recompute._adapters.adapter import kinds
from recompute._budget import format_bytes
from recompute._context import current_cache, is_default
from recompute._described import described
from recompute._engine import requests
from recompute._engine.arguments import pack
from recompute._engine.bindings import bound
from recompute._engine.frames import HandleOf
from recompute._engine.graph import EVICTED, Operation, Options, Value
from recompute._forgotten import Forgotten

if TYPE_CHECKING:
    from recompute._cache import Cache
    from recompute._engine.engine import Engine

_NO_NAMES: Final[Mapping[str, Any]] = {}
_ONE: Final = 1  # compared by identity, which True is not

R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Recomputable(Forgotten, Generic[T_co]):
    """A value and how it was made. Behaves as an identity wrapper: only time and memory change, never a result.

    Made by `pure` (a source, which stays in memory or moves to a tier) and `ap` (the result of an operation). The
    value may be evicted, and recomputed or fetched, at any time between two calls of `get`.
    """

    __slots__ = ("__weakref__", "engine", "node")
    engine: Engine
    node: Value
    """What it refers to, for `recompute.extend`."""

    _is_recomputable = True  # by which arguments are told from plain objects

    def __init__(self, cache: Cache, value: Value) -> None:
        """One more reference to a value of `cache`. To make values, see `pure` and `ap`."""
        requests.refer_again(cache.engine, value, self)

    def __del__(self) -> None:
        try:
            engine = self.engine
            engine.settling.going(self, self.node)
        except AttributeError:  # interrupted before it was complete
            return
        except Exception:
            raise
        except BaseException as interrupt:  # would be lost in a destructor: the next use of the cache raises it
            self.engine.finalizer.interrupts.append((get_ident(), interrupt))

    @property
    def cache(self) -> Cache:
        """The cache that it belongs to."""
        return self.engine.cache  # type: ignore[no-any-return]  # the engine knows no more of it

    def get(self) -> T_co:
        """The value; recomputed, with everything it needs, if it was evicted.

        Inside an operation's function, the value becomes a dependency of the operation. O(1) while resident. Raises
        BudgetError if the recomputation does not fit, and whatever the functions raise.
        """
        value = self.node
        payload = value.payload
        engine = self.engine
        if payload is EVICTED or engine.watchful:
            return requests.get(engine, value)  # type: ignore[no-any-return]  # a payload has any type
        value.storage.last_access = engine.meter.now
        return payload  # type: ignore[no-any-return]

    def evict(self) -> bool:
        """Drop the value now. True if it was dropped; False for a source, a pinned, locked or evicted value."""
        return requests.evict(self.engine, self.node)

    def pin(self) -> Self:
        """Keep the value in memory, recomputed if need be, until `unpin`. Returns the value itself."""
        requests.pin(self.engine, self.node)
        return self

    def unpin(self) -> Self:
        """Let the value be evicted again. Returns the value itself."""
        requests.unpin(self.engine, self.node)
        return self

    def detach(self) -> Self:
        """Keep the value, recomputed if need be, and forget how it was made: a source from now on. Returns itself.

        What it was made from can be freed, and repeated steps (`w = step(w).detach()`) keep no history.
        """
        requests.detach(self.engine, self.node)
        return self

    def map(self, function: Callable[[T_co], R]) -> Recomputable[R]:
        """`ap(function, self)`."""
        return apply_at(function, (self,), {}, 1, None, sys._getframe(1))  # type: ignore[no-any-return]

    @overload
    def apply(
        self: Recomputable[Callable[..., R]],
        *args: Any,
        nout: Literal[1] = 1,
        nbytes: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Recomputable[R]: ...
    @overload
    def apply(
        self: Recomputable[Callable[..., tuple[R1, R2]]],
        *args: Any,
        nout: Literal[2],
        nbytes: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[Recomputable[R1], Recomputable[R2]]: ...
    @overload
    def apply(
        self: Recomputable[Callable[..., Any]],
        *args: Any,
        nout: int,
        nbytes: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[Recomputable[Any], ...]: ...
    def apply(self, *args: Any, nout: int = 1, nbytes: int | Sequence[int] | None = None, **kwargs: Any) -> Any:
        """`ap(self, *args)`: the value is a function, applied inside. The `<*>` of an applicative."""
        return apply_at(self, args, kwargs, nout, nbytes, sys._getframe(1))

    @classmethod
    def _class_of_results(cls, payload: Any) -> type[Recomputable[Any]]:
        """Of what refers to a result if one of the arguments is of this class."""
        return Recomputable

    @property
    def resident(self) -> bool:
        """Whether the value is in memory."""
        return self.node.payload is not EVICTED

    @property
    def pinned(self) -> bool:
        """Whether `pin` keeps it there."""
        return self.node.pinned

    @property
    def number(self) -> int:
        """The number of its storage, by which events and traces know it; aliases share one."""
        return self.node.storage.number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[T_co]]:
        """Copies and pickles as a source of the current cache: with the value, without its history."""
        return pure, (self.get(),)

    def __repr__(self) -> str:
        value = self.node
        what = "source" if value.operation is None else value.operation.name
        state = "pinned" if value.pinned else "resident" if self.resident else "evicted"
        return f"<Recomputable {what}: {state}, {format_bytes(value.storage.size)}>"

    def _repr_html_(self) -> str:
        """For a notebook: what it is and how it was made. Recomputes nothing, and shows nothing of the value."""
        return described(repr(self), self.node).html()


def pure(value: T) -> Recomputable[T]:
    """A source: a value without a recipe; it stays in memory, or moves to a tier. Not copied: do not change it.

    Raises BudgetError if it does not fit into the budget, TypeError if it can be read only once.
    """
    return requests.add_source(current_cache().engine, value, Recomputable)  # type: ignore[no-any-return]  # so it is


@overload
def ap(
    function: Callable[[R1], R],
    argument: Recomputable[R1],
    /,
    *,
    nout: Literal[1] = 1,
    nbytes: int | Sequence[int] | None = None,
) -> Recomputable[R]: ...
@overload
def ap(
    function: Callable[[R1, R2], R],
    first: Recomputable[R1],
    second: Recomputable[R2],
    /,
    *,
    nout: Literal[1] = 1,
    nbytes: int | Sequence[int] | None = None,
) -> Recomputable[R]: ...
@overload
def ap(
    function: Callable[..., R] | Recomputable[Callable[..., R]],
    /,
    *args: Any,
    nout: Literal[1] = 1,
    nbytes: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Recomputable[R]: ...
@overload
def ap(
    function: Callable[..., tuple[R1, R2]] | Recomputable[Callable[..., tuple[R1, R2]]],
    /,
    *args: Any,
    nout: Literal[2],
    nbytes: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Recomputable[R1], Recomputable[R2]]: ...
@overload
def ap(
    function: Callable[..., Any] | Recomputable[Callable[..., Any]],
    /,
    *args: Any,
    nout: int,
    nbytes: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Recomputable[Any], ...]: ...
def ap(
    function: Callable[..., Any] | Recomputable[Any],
    /,
    *args: Any,
    nout: int = 1,
    nbytes: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """Apply `function` to arguments, now, and remember it: a Recomputable of the result.

    Parameters
    ----------
    function
        Pure: its result depends on nothing but its arguments. A callable, or a Recomputable that holds one.
    *args, **kwargs
        Passed to the function. Recomputables among them, and inside tuples, lists and dicts of them, are dependencies:
        the function sees their values.
    nout
        How many outputs it returns as one tuple or list; with more than one, `ap` returns a tuple of Recomputables,
        each with a storage of its own.
    nbytes
        The size of each output, if you know it better than the adapter, or before the first run: that much room is
        made, and that much is counted. One number for all outputs, or one for each.

    An exception from the function passes through, with a note that says where the operation was created. Raises
    BudgetError if arguments and result do not fit into the budget together. Cost: a few microseconds, plus the function
    (docs/results/machinery.md).
    """
    return apply_at(function, args, kwargs, nout, nbytes, sys._getframe(1))


def apply_at(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nout: int,
    nbytes: int | Sequence[int] | None,
    caller: FrameType,
) -> Any:
    """`ap` of what `caller` gave: tracebacks of a repeated run name the line that it is at."""
    if isinstance(function, Recomputable):
        args = (function, *args)
        function = _call
    elif not callable(function):
        raise TypeError(f"ap takes a function first, or a Recomputable that holds one, not {function!r}")
    else:
        function = bound(function)
    keep: list[Recomputable[Any]] = []  # references that live in a list which somebody may change meanwhile
    found: list[Value] = []
    positional: list[Any] | None = None  # None: Recomputables and nothing else
    engine: Engine | None = None
    like: HandleOf = Recomputable
    for argument in args:
        kind = kinds[type(argument)]
        if kind.handle:  # mostly
            if argument.engine is not engine:
                engine = common_engine(engine, argument, args)
            if type(argument) is not Recomputable:
                like = type(argument)._class_of_results
            argument = argument.node
            found.append(argument)
        else:
            if positional is None:
                positional = list(found)
            if not kind.plain:
                argument = pack(argument, keep, found)
        if positional is not None:
            positional.append(argument)
    keywords = None
    if kwargs:
        positional = list(found) if positional is None else positional
        keywords = {name: pack(argument, keep, found) for name, argument in kwargs.items()}
    if keep:
        for handle in keep:
            engine = common_engine(engine, handle, args, kwargs)
        if like is Recomputable:
            like = handle_like(keep)
    arguments = tuple(found)
    options = None
    if nout is not _ONE or nbytes is not None or keywords:
        options = Options(keywords, nout, _declared(nout, nbytes))
    operation = Operation(
        function,
        arguments if positional is None else tuple(positional),
        arguments,
        caller.f_code,
        caller.f_lasti,
        options,
    )
    handles = requests.apply(engine or current_cache().engine, operation, like)
    return handles[0] if options is None or options.nout == 1 else tuple(handles)


def handle_like(arguments: Sequence[Recomputable[Any]]) -> HandleOf:
    """Of what refers to a result: a subclass of Recomputable says itself what is made of its instances."""
    for handle in arguments:
        if type(handle) is not Recomputable:
            return type(handle)._class_of_results
    return Recomputable


def common_engine(
    engine: Engine | None, argument: Recomputable[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_NAMES
) -> Engine:
    """The engine of `argument`; raises ValueError if that is not `engine`, and says which of all arguments it is."""
    if engine is not None and argument.engine is not engine:
        which = [f"argument {number}" for number, one in enumerate(args, 1) if one is argument]
        which += [f"argument {name!r}" for name, one in kwargs.items() if one is argument]
        raise ValueError(
            f"the arguments belong to two caches: {(which or ['one of them'])[0]} to "
            f"{_named(argument.cache)}, the others to {_named(engine.cache)}, in thread {current_thread().name!r} (a "
            "new thread starts in the default cache); make all of them within one `with cache:`, or pass the value: "
            "argument.get()"
        )
    return argument.engine


def _named(cache: Cache) -> str:
    return "the default cache" if is_default(cache) else repr(cache)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _declared(nout: int, nbytes: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if type(nout) is not int or nout < 1:
        raise ValueError(f"nout must be a whole number of outputs, at least 1, not {nout!r}")
    if nbytes is None:
        return None
    if type(nbytes) is int and nbytes >= 0:
        return (nbytes,) * nout
    sizes = tuple(nbytes) if isinstance(nbytes, Sequence) else (nbytes,) * nout
    if len(sizes) != nout or not all(hasattr(size, "__index__") and size >= 0 for size in sizes):
        raise ValueError(f"nbytes must be bytes, at least 0: one number, or {nout} of them, not {nbytes!r}")
    return tuple(size.__index__() for size in sizes)
