"""What a cache tells `logging`, under the name "recompute": evictions and repeated operations, at the level DEBUG.

Whether somebody wants to know is looked up when a cache is made and whenever it is entered, so that setting a level is
all that a program does, and a cache that nobody asks about has no listener. Who has not imported `logging` cannot have
asked. Warnings come under the same name: see `recompute._warned`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from recompute._budget import format_bytes
from recompute._engine.events import Event, Evicted, Forgotten, Listener, Performed
from recompute._tables import seconds

if TYPE_CHECKING:
    from logging import Logger

NAME = "recompute"


class Log:
    """Listens to one cache while the level of the logger is DEBUG or lower."""

    def __init__(self) -> None:
        self._logger: Logger | None = None
        self._stop: Callable[[], None] | None = None
        self._functions: dict[int, str] = {}  # by storage

    def look(self, subscribe: Callable[[Listener], Callable[[], None]]) -> None:
        """Begin to listen if somebody wants to know."""
        logging = sys.modules.get("logging")
        if logging is None or self._stop is not None:
            return
        if self._logger is None:
            self._logger = logging.getLogger(NAME)
        if self._logger.isEnabledFor(logging.DEBUG):
            self._stop = subscribe(self)

    def __call__(self, event: Event) -> None:
        logger, stop = self._logger, self._stop
        if logger is None or not logger.isEnabledFor(10):  # DEBUG
            self._functions.clear()
            self._stop = None
            if stop is not None:
                stop()
        elif type(event) is Performed:
            self._functions.update(dict.fromkeys(event.storages, event.function))
            if event.again:
                size = format_bytes(sum(event.nbytes))
                logger.debug("repeated %s in %s for %s", event.function, seconds(event.cost), size)
        elif type(event) is Evicted and event.why != "release":
            function = self._functions.get(event.storage, "a value")
            size, used = format_bytes(event.nbytes), format_bytes(event.used)
            held = ", which somebody holds" if event.held else ""
            logger.debug(
                "evicted %s, storage %d, %s%s (%s): %s used", function, event.storage, size, held, event.why, used
            )
        elif type(event) is Forgotten:
            self._functions.pop(event.storage, None)
