"""Tasks that run together, and one that has to run alone: what does not fit beside others may fit without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident


class Together:
    """Tasks of one computation, in its threads. A task inside of another is a part of that."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._threads: set[int] = set()
        """Those in which a task runs."""
        self._alone: int | None = None
        """The thread whose task runs alone, or is the next to do so."""

    @contextmanager
    def one(self) -> Iterator[bool]:
        """A task may run, inside the block; False: it is inside of another."""
        thread = get_ident()
        if thread in self._threads:
            yield False
            return
        with self._changed:
            self._changed.wait_for(lambda: self._alone is None)
            self._threads.add(thread)
        try:
            yield True
        finally:
            with self._changed:
                self._threads.discard(thread)
                if self._alone == thread:
                    self._alone = None
                self._changed.notify_all()

    def wait_to_be_alone(self) -> None:
        """Inside of `one`: wait until no other task runs; none begins before this one ends."""
        thread = get_ident()
        with self._changed:
            self._threads.discard(thread)  # it does not run meanwhile
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alone is None)
            self._alone = thread
            self._changed.wait_for(lambda: not self._threads)
            self._threads.add(thread)
