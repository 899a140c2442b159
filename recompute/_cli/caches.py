"""The caches of a program that is run: the default one, and those that it makes itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path
from typing import Any, Final

from recompute import Cache, Stats
from recompute._context import on_new_cache
from recompute._traces.write import Recorder, settings_of
from recompute.extend import Tier

DEFAULT_PLACE: Final = "the default one"
_MOST: Final = 16
"""Caches of a program's own that are looked after: each keeps a file open if there are traces."""


@dataclass
class Followed:
    """One cache. `place`: where it was made, or that it is the default one."""

    cache: Cache
    place: str
    own_budget: Any = None
    """The budget that the program asked for, if it got another one instead."""
    trace: Path | None = None
    close: Callable[[], None] = lambda: None
    """The trace, which is complete from then on."""


class Caches:
    """Follows the default cache, and inside of `following` those that are made, which get budget and tiers asked for.

    `trace` is where the events of the cache that matters most will be; raises OSError if that cannot be written.
    """

    def __init__(self, default: Cache, trace: Path | None, tiers: Sequence[Tier], *, budget_given: bool) -> None:
        self._budget = default.budget
        self._budget_given = budget_given
        special = trace is not None and trace.exists() and not trace.is_file() and not trace.is_dir()
        if special or trace == Path("-"):
            raise OSError(EINVAL, "it is no file")  # a pipe or a device: traces are renamed
        self._trace = trace if trace is None or not trace.is_symlink() else trace.resolve()
        self._tiers = tiers
        self._folder = Path.cwd()
        self.all: list[Followed] = []
        self.passed_over = 0
        """How many were too many."""
        self._follow(Followed(default, DEFAULT_PLACE))

    @contextmanager
    def following(self) -> Iterator[None]:
        on_new_cache.append(self._made)
        try:
            yield
        finally:
            on_new_cache.remove(self._made)

    def _made(self, cache: Cache) -> None:
        if len(self.all) > _MOST:
            self.passed_over += 1
            return
        followed = Followed(cache, _place(self._folder))
        if self._budget_given:
            followed.own_budget = cache.budget
            cache.budget = self._budget
        if self._tiers and cache._engine.memory.tiers is None:
            cache.extend.add_tiers(self._tiers)
        self._follow(followed)

    def _follow(self, followed: Followed) -> None:
        if self._trace is not None:
            self._record(followed)
        self.all.append(followed)

    def _record(self, followed: Followed) -> None:
        assert self._trace is not None
        cache, number = followed.cache, len(self.all)
        followed.trace = self._folder / (
            self._trace.with_name(f"{number}.{self._trace.name}") if number else self._trace
        )
        recorder = Recorder(followed.trace, settings_of(cache))
        recorder.listen(cache)
        followed.close = recorder.close

    def busy(self) -> Stats:
        """The figures of the newest cache in which something was done."""
        for followed in reversed(self.all):
            stats = followed.cache.stats()
            if stats.operations:
                break
        return stats

    def end(self) -> list[tuple[Followed, Stats]]:
        """Those that held something, the one with the largest peak first, and its events where they were asked for.

        The others have theirs beside that, with a number. Without any it is the default one.
        """
        figures = [(followed, followed.cache.stats()) for followed in self.all]
        in_use = [(followed, stats) for followed, stats in figures if stats.peak]
        used = sorted(in_use, key=lambda pair: -pair[1].peak) or figures[:1]
        for followed in self.all:
            followed.close()
            if followed.trace is not None:
                followed.trace = followed.trace.rename(followed.trace.with_name(f"{followed.trace.name}.part"))
        for number, (followed, _) in enumerate(used, start=1):
            if followed.trace is not None and self._trace is not None:
                followed.trace = followed.trace.replace(_numbered(self._trace, number))
        for followed in self.all:
            if followed.trace is not None and all(followed is not other for other, _ in used):
                followed.trace.unlink()
        return used


def _numbered(path: Path, number: int) -> Path:
    stem, dot, ending = path.name.partition(".")
    return path if number == 1 else path.with_name(f"{stem}.{number}{dot}{ending}")


def _place(folder: Path) -> str:
    """Where the program makes a cache, from here: the program may be elsewhere by now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "recompute":
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename, folder)}:{frame.f_lineno}"
