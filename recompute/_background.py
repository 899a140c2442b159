"""Threads of the library itself, which run no operation of a program."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class BackgroundThread(Thread):
    """Draws or plans beside the program, and ends with it. Whoever has all new threads take part leaves it out."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        super().__init__(target=work, name=f"recompute {name}", daemon=True)
