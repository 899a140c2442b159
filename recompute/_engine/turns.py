"""Whose turn it is to draw: while an operation draws from generators, no operation of another thread does."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition, Lock, local
from typing import Any, Final, NamedTuple

from recompute._adapters.generators import Generators
from recompute._engine.reach import Found


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
        self.free = Condition(Lock())
        self.lent = 0
        """Turns that were lent."""

    def begin(self, turn: Turn) -> None:
        """Wait until no other thread draws from its generators."""
        if not self._take([turn]):
            self.lend()
            with self.free:
                while not self._are_free([turn, *self._here.turns]):
                    self.free.wait()
                self._own([turn, *self._here.turns])
            self._swap_back()
        self._here.turns.append(turn)

    def end(self, turn: Turn) -> None:
        if turn in self._here.turns:
            self._here.turns.remove(turn)
        with self.free:
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
            with self.free:
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
            with self.free:
                while not self._are_free(turns):
                    self.free.wait()
                self._own(turns)
            self._swap_back()

    def after_fork(self) -> None:
        """In a child process: the other threads are gone, and what they exchanged is put back."""
        self.free = Condition(Lock())
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
                with self.free:
                    self.lent -= 1
                turn.swap()

    def _take(self, turns: list[Turn]) -> bool:
        with self.free:
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
