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
from threading import get_ident
from time import monotonic, sleep
from typing import IO, Any, Final
from weakref import finalize

from recompute._adapters.packing import Load
from recompute._budget import parse_bytes
from recompute._tiers.link import Link
from recompute._tiers.tier import Store, Tier, about_to_fork

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
    """Any thread may fork at any moment, without a lock that says what others are at: so a file first counts as whole,
    then it is linked for the forks that are about to come. A fork, on the other hand, says first that it comes, and
    then links what is whole. What the memory of a child knows was written by then, and is linked.
    """

    def __init__(self, tier: Disk) -> None:
        limited = None if tier.bandwidth is None else float(parse_bytes(tier.bandwidth))
        expected = min(1e9, limited or 1e9)
        super().__init__(tier, Link(200e-6, expected), Link(200e-6, expected))
        self._place = _place() if tier.folder is None else Path(tier.folder).absolute()  # also after a chdir
        self._pace = Pace(limited)
        self._numbers = count()
        self._folder = _Folder(self._place)
        self._end = finalize(self, self._folder.remove)
        self._whole: set[str] = set()
        """Names of files."""
        self._for_children: dict[object, _Folder | None] = {}
        """Of forks that are about to come; None: there is nothing to share, nor a place for it."""

    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        try:
            return self._write(parts)
        except FileNotFoundError:  # the folder was removed
            self._folder.make_again()
            return self._write(parts)

    def _write(self, parts: Sequence[memoryview]) -> str:
        folder = self._folder
        if not folder.mine:
            if folder is not self._folder:  # the fork was a moment ago, by this thread
                return self._write(parts)
            raise OSError("this process has no place of its own since it was forked")
        path = folder.path / f"{next(self._numbers)}-{folder.path.name}"  # in no other process the same
        try:
            with open(path, "wb", buffering=0, opener=_as_it_is) as file:
                at = 0
                for part in parts:
                    for chunk in _chunks(part):
                        start = monotonic()
                        _write_all(file, chunk, at)
                        at += len(chunk)
                        sleep(self._pace.wait(len(chunk), start, monotonic()))
        except FileNotFoundError:
            raise
        except BaseException:
            if folder.mine:
                with suppress(OSError):
                    path.unlink()
            raise
        self._whole.add(path.name)
        for fork in list(about_to_fork.values()):
            child = self._for_child(fork)
            if child is not None:
                child.share(path)
            self._leave_to_children()  # maybe this one is over by now
        if folder is not self._folder:  # there was a fork meanwhile, by this thread, and the file is the parent's
            return self._write(parts)
        return path.name

    @contextmanager
    def read(self, where: Any) -> Iterator[Load]:
        with open(self._folder.path / where, "rb", buffering=0) as file:
            at = 0

            def load(memory: Any) -> None:
                nonlocal at
                for chunk in _chunks(memory):
                    start = monotonic()
                    _read_all(file, chunk, at)
                    at += len(chunk)
                    sleep(self._pace.wait(len(chunk), start, monotonic()))

            yield load

    def remove(self, where: Any) -> None:
        self._whole.discard(where)
        if self._folder.mine:
            with suppress(OSError):
                os.unlink(self._folder.path / where)

    def describe(self, where: Any) -> str:
        return f"the file {self._folder.path / where}"

    def before_fork(self) -> None:
        """The parent may remove its files at any time: the child gets links to them, in a folder of its own."""
        folder = self._for_child(about_to_fork.get(get_ident()))
        if folder is not None:  # else what the child has here is lost, and it writes nothing
            for name in list(self._whole):
                folder.share(self._folder.path / name)

    def _for_child(self, fork: object) -> _Folder | None:
        """The folder for the child of a fork."""
        if fork not in self._for_children:
            folder = None
            with suppress(OSError):
                if self._folder.path.exists():
                    folder = _Folder(self._place)
            if self._for_children.setdefault(fork, folder) is not folder and folder is not None:
                folder.remove()  # another thread was quicker
        return self._for_children.get(fork)  # None: it is over

    def _leave_to_children(self) -> None:
        """The folders for forks that are over: they are of the children, or of none, and the next one removes them."""
        known = list(self._for_children)  # first: another fork may be prepared just now
        coming = list(about_to_fork.values())
        for fork in known:
            folder = None if fork in coming else self._for_children.pop(fork, None)
            if folder is not None:
                folder.leave()

    def after_fork(self, *, child: bool) -> None:
        if not child:
            self._leave_to_children()
            return
        folder = self._for_child(about_to_fork.get(get_ident()))
        for other in self._for_children.values():
            if other is not None and other is not folder:
                other.leave()
        self._for_children.clear()
        self._pace = Pace(self._pace.bandwidth)  # threads that are not here take no share
        self._end.detach()
        self._folder.leave()
        if folder is None:
            self.limit, self._intended = 0.0, None
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
        """It belongs to this process now, a fork of the one that made it."""
        self._process = os.getpid()

    def leave(self) -> None:
        """It belongs to another process."""
        self._lock.close()

    def share(self, path: Path) -> None:
        """Have a file of another folder here, too: a link, or a copy where there are none."""
        try:
            os.link(path, self.path / path.name)
        except (FileNotFoundError, FileExistsError):  # it is not needed any more, or another thread was quicker
            pass
        except OSError:
            with suppress(OSError):
                copy = self.path / f"{path.name}.{get_ident()}"
                shutil.copyfile(path, copy)
                os.replace(copy, self.path / path.name)

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
        self.bandwidth = bandwidth
        self._until = -inf

    def wait(self, nbytes: int, since: float, now: float) -> float:
        """Seconds to wait, after so many bytes were moved since then, to stay within the bandwidth with all threads.

        Without a lock, which a fork could leave locked: threads that come at the same moment may be a chunk too fast.
        """
        if self.bandwidth is None:
            return 0.0
        self._until = until = max(self._until, since) + nbytes / self.bandwidth
        return max(0.0, until - now)


def _place() -> Path:
    if not os.environ.get("TMPDIR") and os.access(_PLACE, os.W_OK):
        return Path(_PLACE)
    return Path(tempfile.gettempdir())


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _as_it_is(path: str, flags: int) -> int:
    """Not emptied: the same thread may just be writing the same in another process, after a fork."""
    return os.open(path, flags & ~os.O_TRUNC, 0o600)


def _chunks(part: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(part), _CHUNK):
        yield part[start : start + _CHUNK]


def _write_all(file: Any, chunk: memoryview, at: int) -> None:
    while chunk:
        done = _write_at(file, chunk, at)
        chunk, at = chunk[done:], at + done


def _read_all(file: Any, chunk: memoryview, at: int) -> None:
    while chunk:
        done = _read_at(file, chunk, at)
        if not done:
            raise OSError(f"the file {file.name} is too short")
        chunk, at = chunk[done:], at + done


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

    def _write_at(file: Any, chunk: memoryview, at: int) -> int:
        return file.write(chunk)  # type: ignore[no-any-return]

    def _read_at(file: Any, chunk: memoryview, at: int) -> int:
        return file.readinto(chunk)  # type: ignore[no-any-return]

else:
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # a small Unix, such as that of a browser: there no files of others are removed
        flock = None  # type: ignore[assignment]

    def _locked(path: Path) -> IO[bytes]:
        """A file with a lock that goes with the process. It has its name once it is locked, or it would seem free."""
        unlocked = path.with_suffix(".new")
        file = open(unlocked, "wb", opener=_privately)  # noqa: SIM115  # closed with the folder
        if flock is not None:
            flock(file, LOCK_EX | LOCK_NB)
        os.rename(unlocked, path)
        return file

    def _write_at(file: Any, chunk: memoryview, at: int) -> int:
        """At a place that is said, and not the file's, which moves for both processes after a fork."""
        if hasattr(os, "pwrite"):
            return os.pwrite(file.fileno(), chunk, at)
        file.seek(at)
        return file.write(chunk)  # type: ignore[no-any-return]

    def _read_at(file: Any, chunk: memoryview, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [chunk], at)
        file.seek(at)
        return file.readinto(chunk)  # type: ignore[no-any-return]

    def _in_use(path: Path) -> bool:
        """Whether a process has the lock. Raises OSError if there is no such file: it is just being made."""
        with open(path, "rb") as file:
            if flock is None:
                return True
            try:
                flock(file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                return True
        return False
