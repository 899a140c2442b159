"""The errors of the cache; each says what happened and what to do."""

from __future__ import annotations


class BudgetError(MemoryError):
    """The budget cannot hold what must be in memory at once.

    The message names the operation, what it needs, what is locked, pinned or held outside, and how much is missing.
    The cache stays as it was: with a larger budget every value can still be computed.
    """

    device: str | None = None
    """Where the memory is short, if it is an operation or a source that found no room."""
    operation: str | None = None
    """What found no room."""
    needed: int = 0
    """Bytes that would have been in memory together there, none of which could go."""


class ImpureError(RuntimeError):
    """`Cache(verify=True)` saw a function whose second run differed, or a cached value that was changed in place."""


class RandomWarning(UserWarning):
    """A function draws random numbers in a way that a repeated run cannot draw the same.

    Shown once for each function, at its first run, with the generator and the cure.
    """


class StagingError(ValueError):
    """A function cannot be staged, or a staged one was called with other arguments; nothing has changed."""


class SizeWarning(UserWarning):
    """The cache may count too few bytes for a type: it was not written in Python, and does not report its size.

    Shown once for each type in a process. `recompute.register_size` says how large its values are.
    """


class ThrashWarning(UserWarning):
    """For a while most of the computing was repeated computing: the budget is too small for what the program does.

    Shown once for each cache, with the share, the functions that ran again most, and what takes the room.
    """
