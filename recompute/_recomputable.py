"""The surface: `Recomputable`, a value that may be dropped and recomputed; `pure` and `ap` make them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from recompute._budget import format_bytes
from recompute._context import current_cache
from recompute._engine import requests
from recompute._engine.frames import HandleOf
from recompute._engine.graph import EVICTED, Value
from recompute._forgotten import Forgotten
from recompute._handle import Handle, apply_at, class_of_results

if TYPE_CHECKING:
    from recompute._cache import Cache
    from recompute._engine.story import Steps


R = TypeVar("R")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Recomputable(Handle, Forgotten, Generic[T_co]):
    """A value and how it was made. Behaves as an identity wrapper: only time and memory change, never a result.

    Made by `pure` (a source, which stays in memory or moves to a tier) and `ap` (the result of an operation). The
    value may be evicted, and recomputed or fetched, at any time between two calls of `get`.
    """

    __slots__ = ()

    _is_recomputable = True  # by which arguments are told from plain objects
    _reads_outline = False  # whether it wants to know an adapter's outline of what is evicted

    def __init__(self, cache: Cache, value: Value) -> None:
        """One more reference to a value of `cache`. To make values, see `pure` and `ap`."""
        requests.refer_again(cache._engine, value, self)

    if TYPE_CHECKING:

        def get(self) -> T_co:
            """The value; recomputed, with everything it needs, if it was evicted.

            Inside an operation's function, the value becomes a dependency of the operation. O(1) while resident.
            Raises BudgetError if the recomputation does not fit, and whatever the functions raise.
            """

    @property
    def cache(self) -> Cache:
        """The cache that it belongs to."""
        return self._engine.cache  # type: ignore[no-any-return]  # the engine knows no more of it

    def evict(self) -> bool:
        """Drop the value now. True if it was dropped; False for a source, a pinned, locked or evicted value."""
        return requests.evict(self._engine, self._node)

    def pin(self) -> Self:
        """Keep the value in memory, recomputed if need be, until `unpin`. Returns the value itself."""
        requests.pin(self._engine, self._node)
        return self

    def unpin(self) -> Self:
        """Let the value be evicted again. Returns the value itself."""
        requests.unpin(self._engine, self._node)
        return self

    def detach(self) -> Self:
        """Keep the value, recomputed if need be, and forget how it was made: a source from now on. Returns itself.

        What it was made from can be freed, and repeated steps (`w = step(w).detach()`) keep no history.
        """
        requests.detach(self._engine, self._node)
        return self

    def story(self) -> Steps:
        """What became of it, and why, a line each: made, evicted, recomputed for whom.

        Raises ValueError if its cache keeps no log: see `Cache(log=)`. O(log).
        """
        return self.cache.story(self)

    def map(self, function: Callable[[T_co], R]) -> Recomputable[R]:
        """`ap(function, self)`."""
        return apply_at(function, (self,), {}, 1, None, sys._getframe(1), Recomputable)  # type: ignore[no-any-return]

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
        return apply_at(self, args, kwargs, nout, nbytes, sys._getframe(1), Recomputable)

    @classmethod
    def _class_of_results(cls, payload: Any) -> type[Recomputable[Any]]:
        """Of what refers to a result if one of the arguments is of this class."""
        return Recomputable

    @property
    def resident(self) -> bool:
        """Whether the value is in memory."""
        return self._node.payload is not EVICTED

    @property
    def pinned(self) -> bool:
        """Whether `pin` keeps it there."""
        return self._node.pinned

    @property
    def number(self) -> int:
        """The number of its storage, by which events and traces know it; aliases share one."""
        return self._node.storage.number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[T_co]]:
        """Copies and pickles as a source of the current cache: with the value, without its history."""
        return pure, (self.get(),)

    def __repr__(self) -> str:
        value = self._node
        what = "source" if value.operation is None else value.operation.name
        state = "pinned" if value.pinned else "resident" if self.resident else "evicted"
        return f"<Recomputable {what}: {state}, {format_bytes(value.storage.size)}>"

    def _repr_html_(self) -> str:
        """For a notebook: what it is and how it was made. Recomputes nothing, and shows nothing of the value."""
        from recompute._described import described

        return described(repr(self), self._node).html()


def pure(value: T) -> Recomputable[T]:
    """A source: a value without a recipe; it stays in memory, or moves to a tier. Not copied: do not change it.

    Raises BudgetError if it does not fit into the budget, TypeError if it can be read only once.
    """
    return requests.add_source(current_cache()._engine, value, Recomputable)  # type: ignore[no-any-return]  # so it is


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
    (docs/results/floors.md).
    """
    return apply_at(function, args, kwargs, nout, nbytes, sys._getframe(1), Recomputable)


def handle_like(arguments: Sequence[Recomputable[Any]]) -> HandleOf:
    """Of what refers to a result: a subclass of Recomputable says itself what is made of its instances."""
    return class_of_results(arguments, Recomputable)
