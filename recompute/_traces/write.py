"""Writing a trace while a cache runs: events become lines of text as they come, which go to the file by the megabyte.

Each batch is appended as one complete gzip member (if the path ends in .gz), so the file is a valid one after every
flush. It is a complete trace when its last line is End: after `flush` and `close`, not in between.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from recompute._locks import RLock
from recompute._traces.recorded import HEADER, VERSION
from recompute.events import (
    Accessed,
    Added,
    Detached,
    Event,
    Evicted,
    Fetched,
    Foresaw,
    Forgotten,
    LetGo,
    Moved,
    Performed,
    Pinned,
    Released,
    TakenBack,
    Unpinned,
)
from recompute.text import warn

if TYPE_CHECKING:
    from recompute._cache import Cache

_BATCH: Final = 1 << 20  # characters
_LEVEL: Final = 1  # of compression: a better one costs more than the events
_END: Final = '{"event":"End"}\n'


def settings_of(cache: Cache) -> dict[str, object]:
    """The settings of a cache, for the header of its trace."""
    settings: dict[str, object] = {
        "policy": cache.policy.name,
        "search": cache.search.name,
        "release": cache.release,
        "budget": cache.budget,
    }
    options = cache._engine.options
    if options.paste:
        settings |= {"paste": options.paste, "keeps": options.keeps}
    return settings


class Recorder:
    """A listener that writes the events of one cache to a file. Raises OSError here if it cannot be written.

    `settings` are further fields of the header. If writing fails later, there is a warning and no more is recorded: the
    run goes on.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, object]) -> None:
        from recompute import __version__

        self.path: Final = os.fspath(path)
        self._zip = self.path.endswith(".gz")
        self._file = _fresh(self.path)
        self._process = os.getpid()
        self._writing: Any = RLock()
        header = {
            HEADER: VERSION,
            "recompute": __version__,
            "python": platform.python_version(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **settings,
        }
        self._lines = [json.dumps(header, default=str) + "\n"]
        self._threads: dict[int, int] = {}
        self._size = len(self._lines[0])  # characters
        self._ended = False

    def __call__(self, event: Event) -> None:
        write = _LINES.get(type(event))
        if write is not None:  # else it is of a type that says nothing about the program
            line = write(event)
            if type(event) is Performed and event.thread:
                number = self._threads.setdefault(event.thread, len(self._threads))
                if number:  # mostly there is one
                    line = f'{line[:-2]},"thread":{number}}}\n'
            self._lines.append(line)
            self._size += len(line)
            if self._size > _BATCH and not self._writing._is_owned() and self._writing.acquire(blocking=False):
                try:  # else another thread is at it, or this very one, in whose middle a destructor struck
                    self._write()
                except OSError:
                    self._give_up()
                    raise
                finally:
                    self._writing.release()

    def flush(self) -> None:
        """Write what there is, and an end: the file is a complete trace, until the next event."""
        if self._file.closed or (self._ended and not self._lines):
            return
        self._lines.append(_END)
        try:
            with self._writing:
                self._write()
            self._ended = True
        except OSError as error:
            self._give_up()
            warn(f"{self!r} is incomplete: {error}", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Write the rest and close the file; later events are lost. May be called again."""
        self.flush()
        self._give_up()

    def _write(self) -> None:
        count = len(self._lines)  # other threads append meanwhile
        self._size = 0
        text = "".join(self._lines[:count]).encode()
        data = gzip.compress(text, _LEVEL, mtime=0) if self._zip else text
        del self._lines[:count]
        self._ended = False
        if self._file.closed or os.getpid() != self._process:  # a fork: the file is its parent's
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _give_up(self) -> None:
        self._lines.clear()
        self._file.close()

    def __repr__(self) -> str:
        return f"<the trace {self.path}>"


def _fresh(path: str) -> FileIO:
    """A file to write into, and no other recorder: one of an earlier run in this process may still have that open."""
    place = os.path.realpath(path)  # a link stays one
    if os.path.isfile(place) and os.access(place, os.W_OK):
        with suppress(OSError):  # where that is not possible, it is emptied
            os.unlink(place)
    return open(place, "wb", buffering=0)


class _Quoted(dict[str, str]):
    """Texts as JSON, each made once: there are few functions and devices."""

    def __missing__(self, text: str) -> str:
        quoted = self[text] = json.dumps(text)
        return quoted


_quoted: Final = _Quoted()


def _line(kind: type[Event], *fields: str) -> tuple[type[Event], Callable[[Any], str]]:
    """The lines of events whose fields are numbers, and texts if there are any."""
    template = f'{{"event":"{kind.__name__}",' + ",".join(f'"{field}":%s' for field in fields) + "}\n"
    values = attrgetter(*fields)
    if not {"device", "tier", "state"}.intersection(fields):
        return kind, lambda event: template % values(event)
    return kind, lambda event: template % tuple([_quoted[one] if type(one) is str else one for one in values(event)])


def _evicted(event: Evicted) -> str:
    return (
        f'{{"event":"Evicted","time":{event.time},"used":{event.used},"storage":{event.storage},'
        f'"nbytes":{event.nbytes},"why":"{event.why}","held":{"true" if event.held else "false"},'
        f'"ghosts":{_list(event.ghosts)},"tier":{_quoted[event.tier]}}}\n'
    )


def _performed(event: Performed) -> str:
    room = event.room
    place = f',"place":{_quoted[event.place]}' if event.place else ""
    return (
        f'{{"event":"Performed","time":{event.time},"used":{event.used},"function":{_quoted[event.function]},'
        f'"cost":{event.cost},"again":{"true" if event.again else "false"},"storages":{_list(event.storages)},'
        f'"nbytes":{_list(event.nbytes)},"arguments":{_list(event.arguments)},"results":{_list(event.results)},'
        f'"homes":{_list(event.homes)},"inputs":{_list(event.inputs)},"device":{_quoted[event.device]},'
        f'"room":{"null" if room is None else room},"sure":{"true" if event.sure else "false"}{place}}}\n'
    )


def _list(numbers: tuple[int, ...]) -> str:
    return f"[{numbers[0]}]" if len(numbers) == 1 else f"[{','.join(map(str, numbers))}]"


_LINES: Final[dict[type[Event], Callable[[Any], str]]] = dict(
    (
        (Performed, _performed),
        _line(Added, "time", "used", "storage", "nbytes", "device"),
        (Evicted, _evicted),
        _line(Moved, "time", "used", "storage", "nbytes", "tier", "seconds"),
        _line(Fetched, "time", "used", "storage", "nbytes", "tier", "seconds"),
        _line(LetGo, "time", "used", "storage"),
        _line(Accessed, "time", "used", "value"),
        _line(Released, "time", "used", "value"),
        _line(Pinned, "time", "used", "value"),
        _line(Unpinned, "time", "used", "value"),
        _line(Detached, "time", "used", "value"),
        _line(TakenBack, "time", "used", "storage", "nbytes"),
        _line(Foresaw, "time", "used", "state", "why"),
        _line(Forgotten, "time", "used", "storage"),
    )
)


def write(path: str | os.PathLike[str], events: Iterable[Event], **settings: object) -> None:
    """Write events that were collected elsewhere, such as those of an `EventLog`, as a complete trace."""
    recorder = Recorder(path, settings)
    for event in events:
        recorder(event)
    recorder.close()
