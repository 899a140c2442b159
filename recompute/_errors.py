"""The errors of the cache; each says what happened and what to do."""

from __future__ import annotations


class BudgetError(MemoryError):
    """The budget cannot hold what must be in memory at once.

    The message names the operation, what it needs, what is locked, pinned or held outside, and how much is missing.
    The cache is as it was: every value can still be had under a larger budget.
    """

    device: str | None = None
    """Where the memory is short, if it is an operation or a source that found no room."""
    operation: str | None = None
    """What found no room."""
    needed: int = 0
    """Bytes that would have been in memory together there, none of which could go."""


class ImpureError(RuntimeError):
    """`Cache(verify=True)` saw a function whose second run differed, or a cached value that was changed in place."""


class StagingError(ValueError):
    """A function cannot be staged, or a staged one was called with what it was not staged for; nothing has changed."""


class SizeWarning(UserWarning):
    """The cache counts too few bytes of a type, perhaps: it was not made in Python, and does not say how large it is.

    Shown once for each type in a process. `recompute.register_size` says how large its values are.
    """


class ThrashWarning(UserWarning):
    """Most of the computing of a while was repeated computing: the budget is too small for what the program does.

    Shown once for each cache, with what is known: the share, the functions that ran again most, what takes the room.
    """
