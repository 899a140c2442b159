"""`Identity`: the surface of `recompute` without a cache. Nothing is ever evicted: it defines what a program means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

_READ_ONCE = (Iterator, AsyncIterator, Coroutine)


class Identity(Generic[T]):
    """A value, wrapped: what a `Recomputable` promises to be.

    The class stands in for the module too: a program written as `def program(rc): ...` runs as `program(recompute)`
    and as `program(Identity)`, and both must give the same.
    """

    __slots__ = ("__weakref__", "_pinned", "_value")

    def __init__(self, value: T) -> None:
        self._value = value
        self._pinned = False

    def get(self) -> T:
        """The value."""
        return self._value

    def evict(self) -> bool:
        """False: it stays."""
        return False

    def pin(self) -> Identity[T]:
        self._pinned = True
        return self

    def unpin(self) -> Identity[T]:
        self._pinned = False
        return self

    def detach(self) -> Identity[T]:
        return self

    def map(self, function: Callable[[T], U]) -> Identity[U]:
        """`ap(function, self)`."""
        return Identity.ap(function, self)  # type: ignore[no-any-return]  # nout is 1

    def apply(self, *args: Any, nout: int = 1, nbytes: int | Sequence[int] | None = None, **kwargs: Any) -> Any:
        """`ap(self, *args)`: the value is a function."""
        return Identity.ap(self, *args, nout=nout, nbytes=nbytes, **kwargs)

    @property
    def resident(self) -> bool:
        return True

    @property
    def pinned(self) -> bool:
        return self._pinned

    def __repr__(self) -> str:
        return f"<Identity of {self._value!r}>"

    def story(self) -> list[Any]:
        """Nothing ever becomes of it."""
        return []

    @staticmethod
    def pure(value: U) -> Identity[U]:
        """A source. TypeError if it can be read only once."""
        _refuse_read_once(value, "a source")
        return Identity(value)

    @staticmethod
    def ap(
        function: Callable[..., Any] | Identity[Any],
        /,
        *args: Any,
        nout: int = 1,
        nbytes: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply `function` to the arguments, with the values instead of the Identities among and inside them."""
        called = function._value if isinstance(function, Identity) else function
        if not isinstance(function, Identity) and not callable(function):
            raise TypeError(f"ap takes a function first, or an Identity that holds one, not {function!r}")
        positional = [_open(value) for value in args]
        keywords = {name: _open(value) for name, value in kwargs.items()}
        _check(nout, nbytes)
        result = called(*positional, **keywords)
        if nout == 1:
            _refuse_read_once(result, "a result")
            return Identity(result)
        try:
            outputs = tuple(result)
        except TypeError:
            outputs = ()
        if len(outputs) != nout:
            raise ValueError(f"{result!r} is not {nout} outputs")
        for value in outputs:
            _refuse_read_once(value, "a result")
        return tuple([Identity(value) for value in outputs])

    @staticmethod
    def lift(
        function: Callable[..., Any] | None = None,
        /,
        *,
        nout: int = 1,
        nbytes: int | Sequence[int] | None = None,
    ) -> Callable[..., Any]:
        """`lift(f)(x)` is `ap(f, x)`. Also a decorator, with or without arguments."""
        if function is None:
            return lambda function: Identity.lift(function, nout=nout, nbytes=nbytes)
        if not callable(function):
            raise TypeError(f"lift takes a function, not {function!r}")

        @wraps(function)
        def lifted(*args: Any, **kwargs: Any) -> Any:
            return Identity.ap(lambda *args, **kwargs: function(*args, **kwargs), *args, nout=nout, **kwargs)

        return lifted

    @staticmethod
    def sequence(values: Any) -> Identity[Any]:
        """A tuple, list or dict of Identities as an Identity of one; another iterable as a list."""
        return Identity(_open(values if isinstance(values, (tuple, list, dict)) else list(values)))

    @staticmethod
    def traverse(function: Callable[[T], Identity[U]], values: Iterable[T]) -> Identity[list[U]]:
        """`sequence` of `function` of each value."""
        return Identity.sequence([function(value) for value in values])


def _open(argument: Any) -> Any:
    """The argument with the value instead of each Identity; containers of them are copied."""
    if isinstance(argument, Identity):
        return argument._value
    try:
        if type(argument) is list:
            return [_open(part) for part in argument]
        if type(argument) is dict:
            return {key: _open(part) for key, part in argument.items()}
        if isinstance(argument, tuple):
            parts = [_open(part) for part in argument]
            if all(new is old for new, old in zip(parts, argument, strict=True)):
                return argument
            make = getattr(type(argument), "_make", type(argument))
            return make(parts)
    except RecursionError:
        raise ValueError("an argument is nested too deeply, or contains itself") from None
    _refuse_read_once(argument, "an argument")
    return argument


def _refuse_read_once(value: Any, what: str) -> None:
    if isinstance(value, _READ_ONCE):
        raise TypeError(f"{what} is a {type(value).__name__}, which can be read only once")


def _check(nout: int, nbytes: int | Sequence[int] | None) -> None:
    if type(nout) is not int or nout < 1:
        raise ValueError(f"nout must be a whole number of outputs, at least 1, not {nout!r}")
    if nbytes is None:
        return
    sizes = tuple(nbytes) if isinstance(nbytes, Iterable) else (nbytes,) * nout
    if len(sizes) != nout or any(not hasattr(size, "__index__") or size < 0 for size in sizes):
        raise ValueError(f"nbytes must be bytes, at least 0: one number, or {nout} of them, not {nbytes!r}")
