"""Errors raised under the lock, whose words name a function of the user's: they are found when the error is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from recompute._engine.graph import Operation


class LateError(RuntimeError):
    """Its words are found when it is read, without the lock."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self._words = words

    def __str__(self) -> str:
        return self._words()


def needs_itself(operation: Operation) -> LateError:
    """An operation that cannot run before it has run."""
    return LateError(partial(_needs_itself, operation))


def gone(operation: Operation | None) -> LateError:
    """A value without a recipe is not in memory: an argument of the operation, or (None) what was asked for itself."""
    return LateError(partial(_gone, operation))


def _needs_itself(operation: Operation) -> str:
    return f"{operation} needs its own result: it gets a value that is made from it"


def _gone(operation: Operation | None) -> str:
    what = "a value" if operation is None else f"an argument of {operation.name}"
    return (
        f"{what} is gone: another thread has changed the array in place; let threads that change one array take turns, "
        "with a lock"
    )
