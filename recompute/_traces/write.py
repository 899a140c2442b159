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

from recompute._interrupts import is_interrupt
from recompute._locks import RLock, do_if_free, gate, gate_if_free
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
from recompute.text import outside, warn

if TYPE_CHECKING:
    from recompute._cache import Cache

_BATCH: Final = 1 << 13  # events, some megabyte of text
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
    run goes on. An interrupt loses nothing: what it cuts short is done the next time.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, object]) -> None:
        from recompute import __version__

        self.path: Final = os.fspath(path)
        self._zip = self.path.endswith(".gz")
        self._file = _fresh(self.path)
        self._process = os.getpid()
        self._lock: Any = RLock()
        self._writing = gate(self._lock.__enter__, self._lock.__exit__)
        self._writing_if_free = gate_if_free(self._lock)
        header = {
            HEADER: VERSION,
            "recompute": __version__,
            "python": platform.python_version(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **settings,
        }
        self._heard: list[Event | str] = [json.dumps(header, default=str) + "\n"]  # events, and lines
        self._threads: dict[int, int] = {}
        self._rest = memoryview(b"")  # on its way into the file, where it begins at
        self._start = self._written = 0
        self._ended = False

    def listen(self, cache: Cache) -> None:
        """Hear of its events, by a method that no interrupt can cut short; another listener writes them."""
        cache.subscribe(self._heard.append)
        cache.subscribe(self._look)

    def __call__(self, event: Event) -> None:
        self._heard.append(event)
        self._look(event)

    def _look(self, _: Event) -> None:
        if len(self._heard) > _BATCH and not self._lock._is_owned():  # by this very thread, where a destructor struck
            self._saved(lambda: do_if_free(self._writing_if_free, self._write))

    def flush(self) -> None:
        """Write what there is, and an end: the file is a complete trace, until the next event."""
        if not self._file.closed and (self._heard or not self._ended):
            self._heard.append(_END)
            self._saved(self._write_all)

    def close(self) -> None:
        """Write the rest and close the file; later events are lost. May be called again."""
        self.flush()
        self._give_up()

    def _saved(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # a full disk, mostly
            if is_interrupt(error):
                raise
            self._give_up()
            warn(f"{self!r} is incomplete: {error}", RuntimeWarning, stacklevel=outside())

    def _write_all(self) -> None:
        with self._writing:
            self._write()
            self._ended = True

    def _write(self) -> None:
        if self._file.closed or os.getpid() != self._process:  # a fork: the file is its parent's
            self._heard.clear()
            return
        self._write_rest()
        heard = self._heard[:]  # others add to it meanwhile
        count = len(heard)
        text = "".join(map(self._line, heard)).encode()
        data = memoryview(gzip.compress(text, _LEVEL, mtime=0) if self._zip else text)
        self._ended = False
        self._start, self._rest = self._start + self._rest.nbytes, data  # no interrupt comes between these two lines
        del self._heard[:count]
        self._write_rest()

    def _write_rest(self) -> None:
        """Continue at the end of the file; a pipe has none to ask for, so there after the bytes that were counted."""
        place = self._file.tell if self._file.seekable() else lambda: self._written
        while (done := place() - self._start) < self._rest.nbytes:
            self._written += self._file.write(self._rest[done:])

    def _line(self, heard: Event | str) -> str:
        if isinstance(heard, str):
            return heard
        write = _LINES.get(type(heard))
        if write is None:  # of a type that says nothing about the program
            return ""
        line = write(heard)
        if type(heard) is Performed and heard.thread:
            number = self._threads.setdefault(heard.thread, len(self._threads))
            if number:  # mostly there is one
                return f'{line[:-2]},"thread":{number}}}\n'
        return line

    def _give_up(self) -> None:
        self._heard.clear()
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
