"""What a cache tells `logging`, under the name "recompute": evictions and repeated operations, at the level DEBUG.

The level is looked up when a cache is made and whenever it is entered, so that setting a level is
all that a program does, and without it a cache has no listener. Who has not imported `logging` cannot have
asked. The first record of a process says which form of the library runs. Warnings come under the same name: see
`recompute.text`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from recompute import _form
from recompute._budget import format_bytes
from recompute._engine.events import Event, Evicted, Forgotten, Listener, Performed
from recompute.text import outside, seconds

if TYPE_CHECKING:
    from logging import Logger

NAME = "recompute"

_told: list[str] = []
"""The form of the library, once the log has it."""


_loggers: list[Logger] = []
"""The one of that name. It is asked for once: an interrupt in `getLogger` can leave the lock of `logging` acquired."""


class Log:
    """Listens to one cache while the level of the logger is DEBUG or lower."""

    def __init__(self) -> None:
        self._logger: Logger | None = None
        self._stop: Callable[[], None] | None = None
        self._functions: dict[int, str] = {}  # by storage

    def look(self, subscribe: Callable[[Listener], Callable[[], None]]) -> None:
        """Begin to listen if the level asks for it."""
        logging = sys.modules.get("logging")
        if logging is None or self._stop is not None:
            return
        if not _loggers:
            _loggers.append(logging.getLogger(NAME))
        self._logger = _loggers[0]
        if self._logger.isEnabledFor(logging.DEBUG):
            self._stop = subscribe(self)
            if not _told:
                _told.append(_form.described())
                self._logger.debug("the form that runs is %s", *_told)

    def __call__(self, event: Event) -> None:
        logger, stop = self._logger, self._stop
        if logger is None or not logger.isEnabledFor(10):  # DEBUG
            self._functions.clear()
            self._stop = None
            if stop is not None:
                stop()
        elif type(event) is Performed:
            function = f"{event.function} ({event.place})" if event.place else event.function
            self._functions.update(dict.fromkeys(event.storages, function))
            if event.again:
                size = format_bytes(sum(event.nbytes))
                level = outside()
                logger.debug("repeated %s in %s for %s", function, seconds(event.cost), size, stacklevel=level)
        elif type(event) is Evicted and event.why != "release":
            function = self._functions.get(event.storage, "a value")
            size, used = format_bytes(event.nbytes), format_bytes(event.used)
            held = ", held by the program" if event.held else ""
            logger.debug(
                "evicted %s, storage %d, %s%s (%s): %s used",
                *(function, event.storage, size, held, event.why, used),
                stacklevel=outside(),  # the line of the program that wanted the room
            )
        elif type(event) is Forgotten:
            self._functions.pop(event.storage, None)
