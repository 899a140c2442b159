"""Threads of the library itself, which run no operation of a program."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
    """Draws or plans beside the program, and ends with it. Code that makes all new threads take part leaves it out."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(target=work, name=f"recompute {name}", daemon=True)


def threads_of_the_program() -> set[threading.Thread]:
    """All that run now, but for those of the library."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, BackgroundThread)}
