"""The surface: `Recomputable`, a value that may be dropped and recomputed, and the applicative around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import FrameType
from typing import Any, Final, Generic, TypeVar, overload

from recompute._adapters.adapter import kinds
from recompute._budget import format_bytes
from recompute._cache import Cache
from recompute._context import current_cache
from recompute._engine.arguments import pack
from recompute._engine.frames import running
from recompute._engine.graph import EVICTED, Operation, Value
from recompute._engine.references import INTERRUPT
from recompute._engine.repair import HANDLES

_SMALL: Final = 4096  # bytes
_ONE: Final = 1  # compared by identity, which True is not

T = TypeVar("T")
U = TypeVar("U")


class Recomputable(Generic[T]):
    """A value and how it was made. Behaves as an identity wrapper: only time and memory change, never a result.

    Made by `pure` (a source, which is never evicted) and `ap` (the result of an operation). The value may be evicted
    and recomputed at any time between two calls of `get`.
    """

    __slots__ = ("__weakref__", "_cache", "_value")

    def __init__(self, cache: Cache, value: Value) -> None:
        self._cache = cache
        self._value = value  # which counts this reference already

    @classmethod
    def _of(cls, cache: Cache, value: Value) -> Recomputable[Any]:
        """What refers to a result if one of the arguments is of this class."""
        return Recomputable(cache, value)

    def __del__(self) -> None:
        try:
            value = self._value
            storage = value.storage
            if value.uses and not storage.buffer and storage.resident and storage.size < _SMALL:
                # All that could go now is a number or the like. The next use of the cache sees to it: that is cheaper,
                # and leaves an interrupt less time to strike here.
                self._cache._dropped.append(value)
            else:
                self._cache._drop(value)
        except KeyboardInterrupt:  # would be lost in a destructor: the next use of the cache raises it
            self._cache._interrupted = True
            self._cache._dropped.append(INTERRUPT)
        except AttributeError:  # interrupted before it was complete
            return

    def get(self) -> T:
        """The value; recomputed, with whatever that takes, if it was evicted.

        Inside an operation's function, the value becomes a dependency of the operation. O(1) while resident. Raises
        BudgetError if the recomputation does not fit, and whatever the functions raise.
        """
        value = self._value
        payload = value.payload
        cache = self._cache
        if payload is EVICTED or cache._attentive or running.get() is not None:
            return cache._get(value)  # type: ignore[no-any-return]  # a payload has any type
        value.storage.last_access = cache.now
        return payload  # type: ignore[no-any-return]

    def evict(self) -> bool:
        """Drop the value now. True if it was dropped; False for a source, a pinned, locked or evicted value."""
        return self._cache._evict_now(self._value)

    def pin(self) -> Recomputable[T]:
        """Keep the value in memory, recomputed if need be, until `unpin`. Returns the value itself."""
        self._cache._bring(self._value, self._cache._pin)
        return self

    def unpin(self) -> Recomputable[T]:
        """Let the value be evicted again. Returns the value itself."""
        self._cache._unpin(self._value)
        return self

    def detach(self) -> Recomputable[T]:
        """Keep the value, recomputed if need be, and forget how it was made: a source from now on. Returns itself.

        What it was made from can go, and repeated steps (`w = step(w).detach()`) keep no history.
        """
        self._cache._bring(self._value, self._cache._detach)
        return self

    def map(self, function: Callable[[T], U]) -> Recomputable[U]:
        """`ap(function, self)`."""
        return _apply(function, (self,), {}, 1, None, sys._getframe(1))  # type: ignore[no-any-return]

    def apply(self, *args: Any, nout: int = 1, nbytes: int | Sequence[int] | None = None, **kwargs: Any) -> Any:
        """`ap(self, *args)`: the value is a function, applied inside. The `<*>` of an applicative."""
        return _apply(self, args, kwargs, nout, nbytes, sys._getframe(1))

    @property
    def resident(self) -> bool:
        """Whether the value is in memory."""
        return self._value.payload is not EVICTED

    @property
    def pinned(self) -> bool:
        """Whether `pin` keeps it there."""
        return self._value.pinned

    @property
    def number(self) -> int:
        """The number of its storage, by which events and traces know it; aliases share one."""
        return self._value.storage.number

    def __reduce__(self) -> tuple[Callable[[T], Recomputable[T]], tuple[T]]:
        """Copies and pickles as a source of the current cache: the value travels, its history does not."""
        return pure, (self.get(),)

    def __repr__(self) -> str:
        value = self._value
        what = "source" if value.operation is None else value.operation.name
        state = "pinned" if value.pinned else "resident" if self.resident else "evicted"
        return f"<Recomputable {what}: {state}, {format_bytes(value.storage.size)}>"


HANDLES.append(Recomputable)


def pure(value: T) -> Recomputable[T]:
    """A source: a value without a recipe, which is never evicted. Not copied: leave it as it is from now on.

    Raises BudgetError if it does not fit into the budget, TypeError if it can be read only once.
    """
    cache = current_cache()
    with cache._noting:
        return Recomputable(cache, cache._add_source(value))


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
        Passed on. Recomputables among them, and inside tuples, lists and dicts of them, are dependencies: the function
        sees their values.
    nout
        How many outputs it returns as one tuple or list; with more than one, `ap` returns a tuple of Recomputables,
        each with a storage of its own.
    nbytes
        The size of each output, if you know better than the adapter, or before the first run: that much room is made,
        and that much is counted. One number for all outputs, or one each.

    What the function raises passes through, with a note that says where the operation was created. Raises BudgetError
    if arguments and result do not fit into the budget together. Cost: about five microseconds, and the function
    (docs/results/machinery.md).
    """
    caller = sys._getframe(1)
    if kwargs or nout is not _ONE or isinstance(function, Recomputable) or not callable(function):
        return _apply(function, args, kwargs, nout, nbytes, caller)
    declared = None if nbytes is None else _declared(1, nbytes)
    cache: Cache | None = None  # from here on the hot path: benchmarks/operations.py
    positional: list[Any] = []
    found: list[Value] = []
    made: Callable[[Cache, Value], Recomputable[Any]] = Recomputable
    for argument in args:
        cls = type(argument)
        if cls is Recomputable or kinds[cls].handle:
            if cls is not Recomputable:
                made = cls._of
            if cache is None:
                cache = argument._cache
            elif argument._cache is not cache:
                common_cache(cache, argument)  # raises
            argument = argument._value
            found.append(argument)
        elif not kinds[cls].plain:
            return _apply(function, args, kwargs, nout, nbytes, caller)
        positional.append(argument)
    if cache is None:
        cache = current_cache()
    arguments = tuple(found)
    packed = arguments if len(found) == len(positional) else tuple(positional)
    operation = Operation(function, packed, None, arguments, 1, declared, caller.f_code, caller.f_lasti)
    try:  # `cache._settling` written out: a context of its own takes 0.3 us of these five
        value = cache._apply_at_once(operation)
        if value is None:
            value = cache._apply(operation)[0]
            assert value is not None
        return made(cache, value)
    except KeyboardInterrupt:
        cache._interrupted = True
        raise
    finally:
        if cache._dropped or cache._events:
            cache._settle()


def _apply(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nout: int,
    nbytes: int | Sequence[int] | None,
    caller: FrameType,
) -> Any:
    found: list[Value] = []
    keep: list[Recomputable[Any]] = []  # references that live in a list which somebody may change meanwhile
    if isinstance(function, Recomputable):
        args = (function, *args)
        function = _call
    elif not callable(function):
        raise TypeError(f"ap takes a function first, or a Recomputable that holds one, not {function!r}")
    positional = tuple([pack(argument, keep, found) for argument in args])
    keywords = {name: pack(argument, keep, found) for name, argument in kwargs.items()} if kwargs else None
    cache: Cache | None = None
    for each in keep:
        cache = common_cache(cache, each)
    if cache is None:
        cache = current_cache()
    declared = _declared(nout, nbytes)
    operation = Operation(function, positional, keywords, tuple(found), nout, declared, caller.f_code, caller.f_lasti)
    cls = next((type(each) for each in keep if type(each) is not Recomputable), Recomputable)
    with cache._noting:
        outputs = cache._apply(operation)
        handles: list[Recomputable[Any]] = [cls._of(cache, each) for each in outputs if each is not None]
        return handles[0] if nout == 1 else tuple(handles)


def common_cache(cache: Cache | None, argument: Recomputable[Any]) -> Cache:
    """The cache of `argument`; raises ValueError if that is not `cache`."""
    if cache is not None and argument._cache is not cache:
        raise ValueError(
            "the arguments belong to two caches; make all of them in one, or pass the value: argument.get()"
        )
    return argument._cache


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


@overload
def lift(function: Callable[..., Any], /) -> Callable[..., Any]: ...
@overload
def lift(
    *, nout: int = 1, nbytes: int | Sequence[int] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def lift(
    function: Callable[..., Any] | None = None, /, *, nout: int = 1, nbytes: int | Sequence[int] | None = None
) -> Callable[..., Any]:
    """A function of values as a function of Recomputables: `lift(f)(x)` is `ap(f, x)`. Also a decorator."""
    if function is None:
        return lambda function: _lifted(function, nout, nbytes)
    return _lifted(function, nout, nbytes)


def _lifted(function: Callable[..., Any], nout: int, nbytes: int | Sequence[int] | None) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"lift takes a function, not {function!r}")

    @wraps(function)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        return _apply(function, args, kwargs, nout, nbytes, sys._getframe(1))

    return lifted


def sequence(values: Any) -> Recomputable[Any]:
    """A tuple, list or dict of Recomputables as a Recomputable of a tuple, list or dict; another iterable as a list."""
    if not isinstance(values, (tuple, list, dict)):
        values = list(values)
    return _apply(_same, (values,), {}, 1, None, sys._getframe(1))  # type: ignore[no-any-return]


def traverse(function: Callable[[T], Recomputable[U]], values: Iterable[T]) -> Recomputable[list[U]]:
    """`sequence` of `function` of each value: a list in, a Recomputable of a list out."""
    results = [function(value) for value in values]
    return _apply(_same, (results,), {}, 1, None, sys._getframe(1))  # type: ignore[no-any-return]


def _same(value: T) -> T:
    return value
