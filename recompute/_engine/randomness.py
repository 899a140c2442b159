"""Random numbers: a repeated run draws what the first one drew, and leaves generators as it found them.

Before its first run an operation is asked from which generators it could draw (`reachable`). Of those that the run left
in another state the one before is kept. A repeated run gets copies of what it is a method of. The others are put into
that state while it runs, and back into their own afterwards; meanwhile no operation of another thread draws from them
(`Turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, local
from types import (
    BuiltinFunctionType,
    MethodType,
)
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from recompute._adapters.generators import Generators
from recompute._engine.graph import Operation, Options
from recompute._engine.reach import Found
from recompute._errors import RandomWarning
from recompute._interrupts import is_interrupt
from recompute._locks import RLock
from recompute.text import name_of, outside, warn

if TYPE_CHECKING:
    from recompute._engine.engine import Engine

_states: Final[WeakKeyDictionary[Engine, WeakValueDictionary[bytes, State]]] = WeakKeyDictionary()
_lock: Final = RLock()


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


def drawing(engine: Engine, operation: Operation, reached: Sequence[Found]) -> Callable[..., Any]:
    """For one run, in place of the function of an operation that has drawn random numbers, or could.

    `reached`: the generators that it could draw from in its first run.
    """
    draws = None if operation.options is None else operation.options.draws
    return _First(engine, operation, reached) if draws is None else _Again(operation, draws)


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


class State:
    """The state of a generator, once for all operations of a cache that need it."""

    __slots__ = ("__weakref__", "content")

    def __init__(self, content: bytes) -> None:
        self.content = content


class Draw(NamedTuple):
    """What a repeated run needs to draw the same."""

    generator: Any
    by: Generators
    before: State
    after: int
    """The hash of the state that the first run left it in."""


class Turn:
    """One run that may draw from some generators, in one thread."""

    __slots__ = ("_exchanged", "lent", "owned")

    def __init__(self, generators: Sequence[Found] | Sequence[Draw]) -> None:
        self.owned = {id(draw.by.identity(draw.generator)): draw for draw in generators}
        self._exchanged: list[tuple[Any, Generators, bytes]] = []
        self.lent = False

    def exchange(self, draws: Sequence[Draw]) -> None:
        """Put generators into the states that the first run found them in."""
        for draw in draws:
            now = draw.by.save(draw.generator)
            self._exchanged.append((draw.generator, draw.by, now))  # first: an interrupt may come in between
            draw.by.restore(draw.generator, draw.before.content)

    def swap(self) -> None:
        """Put back what was exchanged, or exchange it again."""
        for number, (generator, by, state) in enumerate(self._exchanged):
            self._exchanged[number] = generator, by, by.save(generator)
            by.restore(generator, state)

    def put_back(self) -> None:
        while self._exchanged:
            generator, by, state = self._exchanged[-1]
            by.restore(generator, state)
            self._exchanged.pop()


class Turns:
    """Which thread may draw from which generators. A thread that waits for another one lends what it has."""

    def __init__(self) -> None:
        self._here = _Stack()
        self._owners: dict[int, list[Turn]] = {}
        """By the identity of a generator, the turns of one thread."""
        self._renew()
        self.lent = 0
        """Turns that were lent."""

    def _renew(self) -> None:
        self._lock = RLock()  # entered as such: an interrupt can leave what `Condition.__enter__` enters acquired
        self.free = Condition(self._lock)

    def begin(self, turn: Turn) -> None:
        """Wait until no other thread draws from its generators."""
        if not self._take([turn]):
            self.lend()
            with self._lock:
                while not self._are_free([turn, *self._here.turns]):
                    self.free.wait()
                self._own([turn, *self._here.turns])
            self._swap_back()
        self._here.turns.append(turn)

    def end(self, turn: Turn) -> None:
        if turn in self._here.turns:
            self._here.turns.remove(turn)
        with self._lock:
            if turn.lent:  # it was interrupted while it waited
                self.lent -= 1
            self._disown(turn)
            self.free.notify_all()

    def lend(self) -> bool:
        """Before this thread waits for another one; False: there is nothing to lend."""
        turns = [turn for turn in self._here.turns if not turn.lent]
        for turn in reversed(turns):
            turn.swap()
            turn.lent = True
        if turns:
            with self._lock:
                self.lent += len(turns)
                for turn in turns:
                    self._disown(turn)
                self.free.notify_all()
        return bool(turns)

    def lend_first(self, changed: Condition) -> None:
        """Wait for `changed`; or lend what this thread has, without that lock: then look again before you wait."""
        if all(turn.lent for turn in self._here.turns):
            changed.wait()
            return
        lock: Any = changed
        state = lock._release_save()  # as `Condition.wait` does
        try:
            self.lend()
        finally:
            lock._acquire_restore(state)

    def take_back(self) -> None:
        """Before a function of this thread goes on."""
        turns = [turn for turn in self._here.turns if turn.lent]
        if turns:
            with self._lock:
                while not self._are_free(turns):
                    self.free.wait()
                self._own(turns)
            self._swap_back()

    def after_fork(self) -> None:
        """In a child process: the other threads are gone, and what they exchanged is put back."""
        self._renew()
        mine = self._here.turns
        for turn in {turn for owners in self._owners.values() for turn in owners if turn not in mine}:
            turn.put_back()
        self._owners.clear()
        self._own([turn for turn in mine if not turn.lent])
        self.lent = sum(turn.lent for turn in mine)

    def _swap_back(self) -> None:
        for turn in self._here.turns:
            if turn.lent:
                turn.lent = False
                with self._lock:
                    self.lent -= 1
                turn.swap()

    def _take(self, turns: list[Turn]) -> bool:
        with self._lock:
            if not self._are_free(turns):
                return False
            self._own(turns)
            return True

    def _are_free(self, turns: list[Turn]) -> bool:
        mine = self._here.turns
        return all(owner in mine for turn in turns for number in turn.owned for owner in self._owners.get(number, ()))

    def _own(self, turns: list[Turn]) -> None:
        for turn in turns:
            for number in turn.owned:
                owners = self._owners.setdefault(number, [])
                if turn not in owners:
                    owners.append(turn)

    def _disown(self, turn: Turn) -> None:
        for number in turn.owned:
            owners = self._owners.get(number)
            if owners is not None and turn in owners:
                owners.remove(turn)
                if not owners:
                    del self._owners[number]


class _Stack(local):
    """Of the calling thread: the innermost turn is the last one."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []


turns: Final = Turns()
