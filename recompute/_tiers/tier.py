"""What a tier is: its description by the user, and the store that a cache opens for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, ClassVar, Final
from zlib import crc32

from recompute._adapters.adapter import adapter_for
from recompute._adapters.packing import Load
from recompute._budget import parse_bytes
from recompute._tiers.link import Link

about_to_fork: Final[dict[int, object]] = {}
"""Thread -> the fork that it has prepared, and not done yet: what a tier gets meanwhile, from any thread, is for the
child, too."""

_LEAST, _MOST = 64, 4096
"""Evictions until a tier that was full is tried again: at first, and at most."""


@dataclass(frozen=True)
class Tier(ABC):
    """A place where evicted values may lie until they are needed again.

    Parameters
    ----------
    limit
        Bytes ("50GB"); None: as much as there is.
    always
        Move whatever fits, instead of recomputing what is cheaper to recompute: where costs mislead.
    ahead
        Move values before their room is needed, in a thread of its own, so that the program waits less. What is
        evicted depends on timing then.
    """

    name: ClassVar[str]
    limit: int | str | None = None
    always: bool = False
    ahead: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.limit is not None:
            parse_bytes(self.limit, "the limit of a tier")

    @property
    def nbytes(self) -> float:
        """The limit in bytes; infinite if there is none."""
        return inf if self.limit is None else parse_bytes(self.limit)

    @abstractmethod
    def open(self) -> Store:
        """A store for one cache."""


class Store(ABC):
    """A tier in use by one cache: keeps bytes, and says how long transfers take.

    `write`, `read` and `remove` are called without any lock, by several threads at once. Counts change under
    the lock of the cache.
    """

    checks = True
    """Whether each buffer has a checksum, which is compared when it is read: a file may be damaged."""

    def __init__(self, tier: Tier, writing: Link, reading: Link) -> None:
        self.name = tier.name
        self.limit = tier.nbytes
        self.always = tier.always
        self.ahead = tier.ahead
        self.writing = writing
        self.reading = reading
        self._intended: float | None = None
        """The limit of before it was full; None: it is not."""
        self._pause = self._left = 0
        """Calls of `restore_limit` that change nothing after it was full, and how many of them are still to come."""
        self.reserved = 0
        """Bytes of copies that are being written."""
        self._kept = 0
        self._copies: dict[Any, None] = {}
        """Those that are written, of living values, in the order in which they came."""

    # What a tier does

    @abstractmethod
    def write(self, parts: Sequence[memoryview], nbytes: int) -> Any:
        """Keep these bytes; returns what identifies them. Raises OSError if that fails.

        `nbytes` is what the value counts in memory: about as many, and all that a simulation knows.
        """

    @abstractmethod
    def read(self, where: Any) -> AbstractContextManager[Load]:
        """Inside the block, a function that fills the writable memory it gets with the next bytes.

        Raises OSError if they are gone, or too few.
        """

    @abstractmethod
    def remove(self, where: Any) -> None:
        """Forget these bytes. Must not raise: called at any time and in any thread."""

    def describe(self, where: Any) -> str:
        """What to call these bytes in an error."""
        return f"a copy in {self.name}"

    def before_fork(self) -> None:
        """This thread forks soon: the child has the same copies, with those that other threads write until then."""

    def after_fork(self, *, child: bool) -> None:
        """There is one: this one, or not."""

    # What it is worth

    def price(self, nbytes: int) -> float:
        """Seconds to move so many bytes out and back."""
        return self.writing.seconds(nbytes) + self.reading.seconds(nbytes)

    @property
    def backlog(self) -> float:
        """Seconds for which transfers have to wait now."""
        return 0.0

    # What it has. Under the lock of the cache

    @property
    def used(self) -> int:
        """Bytes."""
        return self.reserved + self._kept

    def lower_limit(self, nbytes: int) -> None:
        """So many reserved bytes could not be written: no more than is here now fits, until the limit is restored."""
        if self._intended is None:
            self._intended = self.limit
        self._pause = self._left = min(max(_LEAST, 2 * self._pause), _MOST)
        self.limit = min(self.limit, self.used - nbytes)

    def restore_limit(self, *, now: bool) -> None:
        """Take as much as was intended: now, or after 64 calls, twice as many each time that it is still full."""
        self._left -= 1
        if self._intended is not None and (now or self._left <= 0):
            self.limit, self._intended = self._intended, None

    def recount(self, writing: int, copies: Sequence[Any]) -> None:
        """These are all the copies that it has, and so many bytes are being written."""
        self.reserved = writing
        self._kept = 0
        self._copies.clear()
        for copy in copies:
            self.enter(copy)

    def enter(self, copy: Any) -> None:
        """The bytes of a copy are written."""
        if self._intended is None:
            self._pause = 0
        self._kept += copy.nbytes
        self._copies[copy] = None

    def leave(self, copy: Any) -> None:
        """The bytes of a copy no longer count, if they did: they will soon be removed."""
        if copy in self._copies:
            del self._copies[copy]
            self._kept -= copy.nbytes

    def oldest(self, most: int) -> Iterator[Any]:
        """So many copies: those that were written, or returned from here, longest ago."""
        for copy in list(islice(self._copies, most)):
            if copy in self._copies:  # what came before may have made it leave
                self._copies[copy] = self._copies.pop(copy)
                yield copy


class Key:
    """Bytes in a store, which are removed with this key, and how to make a value from them."""

    __slots__ = ("_adapter", "_head", "_parts", "_sizes", "_sums", "_where", "nbytes", "store")

    def __init__(self, store: Store, value: Any, nbytes: int) -> None:
        """Of a value to `write`. Raises whatever its adapter raises if it cannot be packed."""
        self.store = store
        self.nbytes = nbytes
        self._adapter = adapter_for(value)
        self._head, buffers = self._adapter.pack(value)
        self._parts = [memoryview(buffer).cast("B") for buffer in buffers]
        self._sums = [crc32(part) if store.checks else None for part in self._parts]
        self._sizes = [len(part) for part in self._parts]

    def write(self) -> None:
        """Once. Raises OSError if that fails."""
        parts, self._parts = self._parts, []
        self._where = self.store.write(parts, self.nbytes)

    def moved(self, store: Store) -> Key:
        """The same bytes in another store. Raises OSError if they cannot be read, or written."""
        key = Key.__new__(Key)
        key.store = store
        key.nbytes = self.nbytes
        key._adapter, key._head, key._sizes = self._adapter, self._head, self._sizes
        parts = [memoryview(bytearray(size)) for size in self._sizes]
        with self.store.read(self._where) as load:
            for part, expected in zip(parts, self._sums, strict=True):
                load(part)
                self._check(part, expected)
        known = zip(parts, self._sums, strict=True)
        key._sums = [crc32(part) if store.checks and sum_ is None else sum_ for part, sum_ in known]
        key._where = store.write(parts, self.nbytes)
        return key

    def load(self) -> Any:
        """The value, read back. Raises OSError if the bytes are not those that were written."""
        sums = deque(self._sums)

        def fill(memory: Any) -> None:
            if not sums:
                raise OSError(f"{self} has {len(self._sums)} buffers, and its adapter asks for more")
            part = memoryview(memory).cast("B")
            load(part)
            self._check(part, sums.popleft())

        with self.store.read(self._where) as load:
            return self._adapter.unpack(self._head, fill)

    def _check(self, part: memoryview, expected: int | None) -> None:
        if expected is not None and crc32(part) != expected:
            raise OSError(f"{self} is corrupted: its bytes are not those that were written")

    def __del__(self) -> None:
        where = getattr(self, "_where", None)
        if where is not None:  # else it could not be written
            self.store.remove(where)

    def __str__(self) -> str:
        return self.store.describe(self._where)
