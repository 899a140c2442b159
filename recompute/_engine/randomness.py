"""Random numbers: a repeated run draws what the first one drew, and leaves generators as it found them.

Before its first run an operation is asked from which generators it could draw (`reachable`). Of those that the run left
in another state the one before is kept. A repeated run gets copies of what it is a method of. The others are put into
that state while it runs, and back into their own afterwards; meanwhile no operation of another thread draws from them
(`turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from types import (
    BuiltinFunctionType,
    MethodType,
)
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from recompute._engine.graph import Operation, Options
from recompute._engine.reach import Found
from recompute._engine.reachable import reached_by
from recompute._engine.turns import Draw, State, Turn, turns
from recompute._errors import RandomWarning
from recompute._interrupts import is_interrupt
from recompute._names import name_of
from recompute._warned import outside, warn

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

_states: Final[WeakKeyDictionary[Engine, WeakValueDictionary[bytes, State]]] = WeakKeyDictionary()
_lock: Final = Lock()


def _kept(engine: Engine, content: bytes) -> State:
    """The bytes count as used, as long as an operation needs them."""
    with _lock:
        states = _states.setdefault(engine, WeakValueDictionary())
        state = states.get(content)
        if state is not None:
            return state
        state = states[content] = State(content)
    if engine.hold is not None:
        engine.hold(state, "cpu", len(content))
    return state


def drawing(engine: Engine, operation: Operation) -> Callable[..., Any]:
    """The operation's function, for one run: itself, unless it draws random numbers, or could."""
    if turns.lent:
        turns.take_back()
    if operation.runs:
        options = operation.options
        return operation.function if options is None or options.draws is None else _Again(operation, options.draws)
    reached = reached_by(operation)
    return _First(engine, operation, reached) if reached else operation.function


class _First:
    """A first run: what it draws from is noticed."""

    def __init__(self, engine: Engine, operation: Operation, found: Sequence[Found]) -> None:
        self._engine = engine
        self._operation = operation
        self._found = found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = Turn(self._found)
        turns.begin(turn)
        try:
            before = [_saved(found) for found in self._found]
            result = self._operation.function(*args, **kwargs)
            draws = [draw for draw in map(self._draw, self._found, before) if draw is not None]
        finally:
            turns.end(turn)
        if draws:
            options = self._operation.options = self._operation.options or Options()
            options.draws = tuple(draws)
        return result

    def _draw(self, found: Found, before: bytes | None) -> Draw | None:
        operation, generator = self._operation, found.generator
        if before is None:
            _tell(operation, generator, "has no state that can be saved, so that its numbers cannot be drawn again")
            return None
        after = found.by.save(generator)
        if after == before:
            return None
        if found.result:
            _tell(operation, generator, "is part of a value that may be evicted, and comes back in an earlier state")
            return None
        if not _is_substituted(operation.function, found):
            try:  # whether it can be done
                found.by.restore(generator, before)
                found.by.restore(generator, after)
            except Exception as error:
                if is_interrupt(error):
                    raise
                _tell(operation, generator, f"cannot be put back into its earlier state: {error}")
                return None
        return Draw(generator, found.by, _kept(self._engine, before), hash(after))


class _Again:
    """A repeated run: it draws what the first run drew."""

    def __init__(self, operation: Operation, draws: Sequence[Draw]) -> None:
        self._operation = operation
        self._draws = draws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._operation.function
        copies: dict[int, Any] = {}
        rest: list[Draw] = []
        for draw in self._draws:
            if _is_substituted(function, draw):
                copies[id(draw.generator)] = draw.by.copy(draw.generator, draw.before.content)
            else:
                rest.append(draw)
        if copies:
            function = _with_copies(function, copies)
        if not rest:
            return function(*args, **kwargs)
        turn = Turn(rest)
        turns.begin(turn)
        try:
            turn.exchange(rest)
            result = function(*args, **kwargs)
            for draw in rest:
                if hash(draw.by.save(draw.generator)) != draw.after:
                    _tell(
                        self._operation,
                        draw.generator,
                        "was drawn from otherwise in a repeated run than in the first one, by the function itself or "
                        "by another thread at the same time",
                    )
            return result
        finally:
            try:
                if not turn.lent:
                    turn.put_back()
            finally:
                turns.end(turn)


def _saved(found: Found) -> bytes | None:
    try:
        return found.by.save(found.generator)
    except Exception as error:  # it is not in memory, but in a device of the system, or of a class of its own
        if is_interrupt(error):
            raise
        return None


def _is_substituted(function: Any, draw: Found | Draw) -> bool:
    """Whether a function is a method of this generator, or a partial of one: a repeated run gets another one."""
    while type(function) is partial:
        if any(part is draw.generator for part in (*function.args, *function.keywords.values())):
            return True
        function = function.func
    return type(function) in (MethodType, BuiltinFunctionType) and function.__self__ is draw.generator


def _with_copies(function: Any, copies: dict[int, Any]) -> Any:
    """The same function, of other generators."""
    if type(function) is partial:
        inner = _with_copies(function.func, copies)
        named = {name: copies.get(id(part), part) for name, part in function.keywords.items()}
        return partial(inner, *[copies.get(id(part), part) for part in function.args], **named)
    copy = copies.get(id(getattr(function, "__self__", None)))
    return function if copy is None else getattr(copy, function.__name__)


def _tell(operation: Operation, generator: Any, what: str) -> None:
    """Once for each function."""
    key = getattr(operation.function, "__code__", None) or operation.name, what
    if key not in _told:
        _told.add(key)
        warn(
            f"{operation.name} (created at {operation.created}) draws random numbers, and a repeated run of it may "
            f"draw others: {name_of(type(generator))} {what}; pass the function a seed, and make the generator "
            "inside it, or detach() the result",
            RandomWarning,
            stacklevel=outside(),
        )


_told: Final[set[Any]] = set()
