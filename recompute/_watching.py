"""A live view of a cache: a panel or a line in a terminal, a table below the cell in a notebook."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from math import ceil
from threading import Event as Signal
from time import perf_counter
from typing import TYPE_CHECKING, Final
from weakref import ref

from recompute._background import BackgroundThread
from recompute._budget import format_bytes
from recompute._engine.events import Event, Performed
from recompute._engine.stats import MOST, Stats
from recompute._interrupts import suppress
from recompute._live import Live
from recompute._terminal import is_terminal
from recompute.text import List, Table, seconds

if TYPE_CHECKING:
    from recompute._cache import Cache

_FADE: Final = 0.9  # of what has happened, at each drawing
_HISTORY: Final = 40  # drawings
_LEVELS: Final = " ▁▂▃▄▅▆▇█"


class Recent:
    """A listener: what has been computed of late. What is older counts less, by a factor at each drawing."""

    def __init__(self) -> None:
        self.news = True
        """Whether anything has happened since the last drawing."""
        self._computed = self._repeated = 0.0  # seconds
        self._functions: dict[str, float] = {}
        self._used: deque[int] = deque(maxlen=_HISTORY)
        self._shares: deque[float] = deque(maxlen=_HISTORY)

    def __call__(self, event: Event) -> None:
        self.news = True
        if type(event) is Performed:
            if event.again:
                self._repeated += event.cost
                self._functions[event.function] = self._functions.get(event.function, 0.0) + event.cost
            else:
                self._computed += event.cost

    def fade(self, used: int) -> None:
        """One drawing further, with so many bytes in use."""
        self.news = False
        self._used.append(used)
        self._shares.append(self.share)
        self._computed *= _FADE
        self._repeated *= _FADE
        self._functions = {name: time * _FADE for name, time in list(self._functions.items())}

    @property
    def share(self) -> float:
        """Of the time that was spent on repeated computing."""
        spent = self._computed + self._repeated
        return self._repeated / spent if spent else 0.0

    def history(self, most: int) -> str:
        """The bytes in use at the last drawings, as a picture; `most` is as high as it gets."""
        return "".join(_LEVELS[min(8, -(-8 * used // max(1, most)))] for used in self._used)

    def repeated(self) -> str:
        """The share of the computing that was repeated at the last drawings, as a picture: all of it is as high."""
        return "".join(_LEVELS[min(8, ceil(8 * share))] for share in self._shares)

    def functions(self) -> list[tuple[str, str]]:
        """Those that were repeated most, with their share of that."""
        found = sorted(self._functions.items(), key=lambda item: -item[1])[:MOST]
        whole = sum(self._functions.values())
        return [(name, f"{time / whole:.0%}") for name, time in found if whole and time / whole >= 0.005]


def parts(stats: Stats) -> list[str]:
    """One line, the most telling first; empty before the first operation."""
    if not stats.operations:
        return []
    used = format_bytes(stats.used)
    return [
        used if stats.budget is None else f"{used} of {format_bytes(stats.budget)}",
        f"{stats.operations:,} operations",
        f"{stats.evictions:,} evictions",
        f"overhead {stats.overhead:.2f}",
        f"{stats.rematerializations:,} rematerializations",
    ]


def picture(stats: Stats, recent: Recent) -> Table:
    """Several lines: the memory and its history, the counters, what is repeated of late."""
    most = stats.peak if stats.budget is None else stats.budget
    budget = "" if stats.budget is None else f" of {format_bytes(stats.budget)}"
    pairs = [
        ("memory", f"{format_bytes(stats.used)}{budget}, peak {format_bytes(stats.peak)}"),
        ("", recent.history(most)),  # as high as the budget, or the peak
        ("operations", f"{stats.operations:,}, {stats.rematerializations:,} repeated"),
        ("evictions", f"{stats.evictions:,}"),
        ("compute", f"{seconds(stats.model_time + stats.remat_time)}, {seconds(stats.remat_time)} of it repeated"),
        ("overhead", f"{stats.overhead:.2f}; of late {recent.share:.0%} of the computing is repeated"),
        ("", recent.repeated()),
    ]
    functions = recent.functions()
    return Table("recompute", pairs, [List(["repeated of late", "share"], functions, "<>")] if functions else [])


class View:
    """What `Cache.watch` shows, until `stop`. It does not keep the cache alive."""

    def __init__(self, cache: Cache, every: float) -> None:
        if not every > 0:
            raise ValueError(f"every is in seconds, and more than 0, not {every!r}")
        self._cache = ref(cache)
        self._recent = Recent()
        self._screen = self._open(every)
        self._unsubscribe = cache.subscribe(self._recent)
        self._screen.__enter__()
        atexit.register(self.stop)

    def _open(self, every: float) -> AbstractContextManager[object]:
        show = _notebook()
        if show is None and is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
            show = _panel()
            if show is None:
                return Live(lambda: parts(self._stats()), wait=every, every=every)
        return nullcontext() if show is None else _Drawing(self._picture, show, every)

    def stop(self) -> None:
        """Show the last figures, and no more."""
        atexit.unregister(self.stop)
        self._unsubscribe()
        screen, self._screen = self._screen, nullcontext()
        screen.__exit__(None, None, None)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _stats(self) -> Stats:
        cache = self._cache()
        if cache is None:
            raise _Gone
        return cache.stats()

    def _picture(self) -> Table | None:
        """None: nothing has happened."""
        if not self._recent.news:
            return None
        stats = self._stats()
        self._recent.fade(stats.used)
        return picture(stats, self._recent)


class _Gone(Exception):
    """There is no cache any more."""


class _Drawing:
    """Inside the block, a daemon thread draws what there is to see; the last time when the block ends."""

    def __init__(self, picture: Callable[[], Table | None], show: Callable[[Table | None], None], every: float) -> None:
        self._picture = picture
        self._show = show
        self._every = every
        self._done = Signal()
        self._thread = BackgroundThread("view", self._draw_until_done)

    def __enter__(self) -> None:
        self._draw()
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        try:
            with suppress(Exception):  # the terminal or the cache has gone
                self._draw()
        finally:
            self._show(None)

    def _draw_until_done(self) -> None:
        pause = self._every
        while not self._done.wait(pause):
            start = perf_counter()
            try:
                self._draw()
            except Exception:  # the terminal or the cache has gone: the program matters more
                return
            pause = max(self._every, 20 * (perf_counter() - start))

    def _draw(self) -> None:
        table = self._picture()
        if table is not None:
            self._show(table)


def _notebook() -> Callable[[Table | None], None] | None:
    """Shows a table below the cell of a notebook that runs now; None: this is no notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    tools = import_module("IPython.display")
    cell = tools.display(tools.HTML(""), display_id=True)

    def show(table: Table | None) -> None:
        if table is not None:
            cell.update(tools.HTML(table.html()))

    return show


def _panel() -> Callable[[Table | None], None] | None:
    """Shows a table at the bottom of the terminal; None: rich is not installed, or shows something of others there."""
    try:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.live import Live as Panel
        from rich.text import Text
    except ImportError:
        return None
    panel = Panel(console=Console(stderr=True), auto_refresh=False)
    try:
        panel.start()
    except LiveError:
        return None

    def show(table: Table | None) -> None:
        if table is None:
            panel.stop()
        else:
            panel.update(Text(str(table), no_wrap=True, overflow="ellipsis"), refresh=True)

    return show
