"""A disk as a tier: one file for each copy, in a private folder that is removed with the cache.

After a crash the next process that uses the same place removes the folder, because its lock is free.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, Final
from weakref import finalize

from recompute._adapters.packing import Load
from recompute._budget import parse_bytes
from recompute._tiers.link import Link
from recompute._tiers.tier import Store, Tier

_PREFIX: Final = "recompute-"
_LOCK: Final = "lock"
_CHUNK: Final = 1 << 23
"""Bytes that are moved at once."""

_PLACE: Final = "/var/tmp"
"""On a disk by the Filesystem Hierarchy Standard, where /tmp may be memory."""


@dataclass(frozen=True)
class Disk(Tier):
    """Files in a private folder, which is removed at the end of the cache or the process.

    Parameters
    ----------
    limit
        Bytes ("50GB"); None: until the disk is full.
    folder
        Where the private folder is made; None: in TMPDIR if that is set, else in /var/tmp or where Python has temporary
        files. Best on a local disk.
    bandwidth
        At most so many bytes a second ("200MB"), to leave bandwidth to others. None: no limit.
    always
        Move whatever fits, instead of recomputing what is cheaper to recompute.
    ahead
        Move values before their room is needed, in a thread of its own, so that the program waits less.
    """

    name = "disk"
    folder: str | os.PathLike[str] | None = None
    bandwidth: int | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bandwidth is not None:
            parse_bytes(self.bandwidth, "the bandwidth of a disk")

    def open(self) -> Store:
        """Raises OSError if the folder cannot be made."""
        return _DiskStore(self)


class _DiskStore(Store):
    def __init__(self, tier: Disk) -> None:
        limited = None if tier.bandwidth is None else float(parse_bytes(tier.bandwidth))
        expected = min(1e9, limited or 1e9)
        super().__init__(tier, Link(200e-6, expected), Link(200e-6, expected))
        self._place = _place() if tier.folder is None else Path(tier.folder)
        self._pace = Pace(limited)
        self._numbers = count()
        self._folder = _Folder(self._place)
        self._end = finalize(self, self._folder.remove)
        self._for_child: _Folder | None = None

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        try:
            return self._write(f"{next(self._numbers)}", parts)
        except FileNotFoundError:  # somebody has removed the folder
            self._folder.make_again()
            return self._write(f"{next(self._numbers)}", parts)

    def _write(self, name: str, parts: Sequence[memoryview]) -> str:
        path = self._folder.path / name
        try:
            with open(path, "xb", buffering=0, opener=_privately) as file:
                for part in parts:
                    for chunk in _chunks(part):
                        start = monotonic()
                        _write_all(file, chunk)
                        sleep(self._pace.wait(len(chunk), start, monotonic()))
        except FileNotFoundError:
            raise
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        return name

    @contextmanager
    def read(self, where: Any) -> Iterator[Load]:
        with open(self._folder.path / where, "rb", buffering=0) as file:

            def load(memory: Any) -> None:
                for chunk in _chunks(memory):
                    start = monotonic()
                    _read_all(file, chunk)
                    sleep(self._pace.wait(len(chunk), start, monotonic()))

            yield load

    def remove(self, where: Any) -> None:
        if self._folder.mine:
            with suppress(OSError):
                os.unlink(self._folder.path / where)

    def describe(self, where: Any) -> str:
        return f"the file {self._folder.path / where}"

    def before_fork(self) -> None:
        """The parent may remove its files at any time: the child gets links to them, in a folder of its own."""
        self._for_child = None
        with suppress(OSError):  # then what the child has here is lost, and it writes nothing
            names = os.listdir(self._folder.path)
            self._for_child = folder = _Folder(self._place)
            for name in names:
                if name != _LOCK:
                    with suppress(OSError):  # it goes just now, or files here cannot have links
                        os.link(self._folder.path / name, folder.path / name)

    def after_fork(self, *, child: bool) -> None:
        folder, self._for_child = self._for_child, None
        if not child:
            if folder is not None:
                folder.leave()
            return
        self._end.detach()
        self._folder.leave()
        if folder is None:
            self.limit = 0.0
        else:
            folder.belongs_here()
            self._folder = folder
            self._end = finalize(self, folder.remove)


class _Folder:
    """A private folder of this process."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._process = os.getpid()
        place.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(place)
        self._make()

    def _make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._place))  # of mode 0o700
        self._lock = _locked(self.path / _LOCK)

    @property
    def mine(self) -> bool:
        """Whether this process made it, and not one that it was forked from."""
        return self._process == os.getpid()

    def belongs_here(self) -> None:
        """It belongs to this process from now on, a fork of the one that made it."""
        self._process = os.getpid()

    def leave(self) -> None:
        """It belongs to another process."""
        self._lock.close()

    def make_again(self) -> None:
        if not self.path.exists():
            self._lock.close()
            self._place.mkdir(parents=True, exist_ok=True)
            self._make()

    def remove(self) -> None:
        if self.mine:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class Pace:
    """Keeps all threads together within a bandwidth, in bytes a second; None: no limit."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth = bandwidth
        self._until = -inf

    def wait(self, nbytes: int, since: float, now: float) -> float:
        """Seconds to wait, after so many bytes were moved since then, to stay within the bandwidth with all threads.

        Without a lock, which a fork could leave locked: threads that come at the same moment may be a chunk too fast.
        """
        if self._bandwidth is None:
            return 0.0
        self._until = until = max(self._until, since) + nbytes / self._bandwidth
        return max(0.0, until - now)


def _place() -> Path:
    if not os.environ.get("TMPDIR") and os.access(_PLACE, os.W_OK):
        return Path(_PLACE)
    return Path(tempfile.gettempdir())


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _chunks(part: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(part), _CHUNK):
        yield part[start : start + _CHUNK]


def _write_all(file: Any, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[file.write(chunk) :]


def _read_all(file: Any, chunk: memoryview) -> None:
    while chunk:
        done = file.readinto(chunk)
        if not done:
            raise OSError(f"the file {file.name} is too short")
        chunk = chunk[done:]


def _remove_left_behind(place: Path) -> None:
    """Remove the folders of processes that have ended without doing so."""
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if _is_own(folder) and not _in_use(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    return not folder.is_symlink() and (not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid())


if sys.platform == "win32":

    def _locked(path: Path) -> IO[bytes]:
        """A file that cannot be removed as long as this process has it open."""
        return open(path, "wb")

    def _in_use(path: Path) -> bool:
        try:
            path.unlink()
        except PermissionError:
            return True
        return False

else:
    from fcntl import LOCK_EX, LOCK_NB, flock

    def _locked(path: Path) -> IO[bytes]:
        """A file with a lock that goes with the process."""
        file = open(path, "wb", opener=_privately)  # noqa: SIM115  # closed with the folder
        flock(file, LOCK_EX | LOCK_NB)
        return file

    def _in_use(path: Path) -> bool:
        """Whether somebody has the lock. Raises OSError if there is no such file: it is just being made."""
        with open(path, "rb") as file:
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                return True
        return False
