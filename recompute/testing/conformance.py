"""The conformance kit: the author of an adapter runs it to see that the cache can rely on the adapter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from sys import getrefcount
from typing import Any
from weakref import ref

from recompute._adapters import adapter as _adapter
from recompute._adapters.adapter import Adapter
from recompute._cache import Cache
from recompute._recomputable import ap

Make = Callable[[], Any]


def check_adapter(
    adapter: Adapter,
    examples: Iterable[Make],
    *,
    view: Callable[[Any], Any] | None = None,
    change: Callable[[Any], None] | None = None,
    equal: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Raise AssertionError, and say what is wrong, if `adapter` breaks a promise of `recompute.adapters.Adapter`.

    Parameters
    ----------
    examples
        Functions without arguments that make a value: always the same one, and a new object in every call.
    view
        Makes of a value another one that shares its memory.
    change
        Changes a value in place.
    equal
        Whether two values are equal to the last bit; by default, whether their fingerprints are.
    """
    for make in examples:
        _Check(adapter, make, view, change, equal).run()


class _Check:
    def __init__(
        self,
        adapter: Adapter,
        make: Make,
        view: Callable[[Any], Any] | None,
        change: Callable[[Any], None] | None,
        equal: Callable[[Any, Any], bool] | None,
    ) -> None:
        self.adapter = adapter
        self.make = make
        self.view = view
        self.change = change
        self.equal = equal or (lambda a, b: adapter.fingerprint(a) == adapter.fingerprint(b))
        self.who = f"{adapter!r}, {type(make()).__qualname__}"

    def run(self) -> None:
        self.serves()
        self.size()
        self.device()
        self.signature()
        self.fingerprint()
        self.freeze()
        self.aliases()
        self.no_reference()
        self.watch()
        self.packing()
        self.round_trip()

    def serves(self) -> None:
        named = isinstance(self.adapter.name, str) and self.adapter.name != ""
        assert named, f"{self.who}: it has no name"
        assert self.adapter.serves(type(self.make())), f"{self.who}: it does not serve the type"

    def size(self) -> None:
        value = self.make()
        size = self.adapter.nbytes(value)
        assert type(size) is int, f"{self.who}: nbytes gave {size!r}, which is not an int"
        assert size >= 0, f"{self.who}: nbytes gave {size}, which is negative"
        assert self.adapter.nbytes(value) == size, f"{self.who}: nbytes is not the same when asked twice"
        other = self.adapter.nbytes(self.make())
        assert other == size, f"{self.who}: nbytes is {size} for one value and {other} for an equal one"

    def device(self) -> None:
        device = self.adapter.device(self.make())
        named = type(device) is str and device != ""
        assert named, f"{self.who}: device gave {device!r}, which is not a name"
        devices = self.adapter.devices()
        listed = isinstance(devices, list) and all(type(name) is str for name in devices)
        assert listed, f"{self.who}: devices gave {devices!r}, which is not a list of names"
        free = self.adapter.free_memory(device)
        assert free is None or (type(free) is int and free >= 0), f"{self.who}: free_memory gave {free!r}"

    def signature(self) -> None:
        one, other = self.adapter.signature(self.make()), self.adapter.signature(self.make())
        try:
            same_hash = hash(one) == hash(other)
        except TypeError:
            raise AssertionError(f"{self.who}: signature gave {one!r}, which cannot be hashed") from None
        same = one == other and same_hash
        assert same, f"{self.who}: the signatures of equal values differ: {one!r}, {other!r}"

    def fingerprint(self) -> None:
        value = self.make()
        one = self.adapter.fingerprint(value)
        assert one is None or type(one) is bytes, f"{self.who}: fingerprint gave {one!r}, which is not bytes"
        assert self.adapter.fingerprint(self.make()) == one, f"{self.who}: the fingerprints of equal values differ"
        if one is not None and self.change is not None:
            self.change(value)
            assert self.adapter.fingerprint(value) != one, f"{self.who}: the fingerprint did not see a change"

    def freeze(self) -> None:
        value = self.make()
        size = self.adapter.nbytes(value)
        self.adapter.freeze(value)
        assert self.equal(value, self.make()), f"{self.who}: freeze changed the value"
        assert self.adapter.nbytes(value) == size, f"{self.who}: freeze changed the size"

    def aliases(self) -> None:
        value, other = self.make(), self.make()
        mine = self.adapter.buffer(value)
        assert mine is self.adapter.buffer(value), f"{self.who}: buffer gives a new object each time it is asked"
        if mine is not None:
            assert mine is not self.adapter.buffer(other), f"{self.who}: two values of their own share a buffer"
        if self.view is not None:
            seen = self.view(value)
            shared = mine is not None and self.adapter.buffer(seen) is mine
            assert shared, f"{self.who}: a view does not share the buffer of what it looks at"

    def no_reference(self) -> None:
        value = self.make()
        before = _references([value])
        for ask in (
            self.adapter.nbytes,
            self.adapter.device,
            self.adapter.signature,
            self.adapter.fingerprint,
            self.adapter.freeze,
            self.adapter.buffer,
            self.adapter.watch,
        ):
            ask(value)
            if _references([value]) != before:
                gc.collect()
            assert _references([value]) == before, f"{self.who}: {ask.__name__} keeps a reference to the value"

    def watch(self) -> None:
        value = self.make()
        watched = self.adapter.watch(value)
        if watched is None:
            return
        try:
            reference = ref(watched)
        except TypeError:
            if type(self.adapter).watch is Adapter.watch:
                return  # the default leaves it to Python whether there are weak references
            raise AssertionError(f"{self.who}: watch gave {watched!r}, which takes no weak references") from None
        del watched
        assert reference() is not None, f"{self.who}: what watch gave died before the value"
        seen = None if self.view is None else self.view(value)
        del value
        if seen is not None:
            assert reference() is not None, f"{self.who}: what watch gave died while a view holds the memory"
            del seen
        if reference() is not None:
            gc.collect()  # it may be in a cycle
        assert reference() is None, f"{self.who}: what watch gave outlives the value"

    def packing(self) -> None:
        """A value that can be packed comes back the same; one that cannot is not moved, and that is no mistake."""
        value = self.make()
        size, before = self.adapter.nbytes(value), _references([value])
        try:
            head, buffers = self.adapter.pack(value)
        except Exception:
            return
        try:
            parts = [bytes(memoryview(buffer).cast("B")) for buffer in buffers]
        except TypeError as error:
            raise AssertionError(f"{self.who}: pack gave something else than contiguous buffers ({error})") from None
        del buffers
        assert self.equal(value, self.make()), f"{self.who}: pack changed the value"
        gc.collect()
        assert _references([value]) == before, f"{self.who}: what pack remembers keeps a reference to the value"
        back = self.adapter.unpack(head, self.loading(parts))
        assert not parts, f"{self.who}: unpack left {len(parts)} of the buffers that pack gave"
        same = type(back) is type(value) and self.equal(back, value)
        assert same, f"{self.who}: the value came back different from its bytes"
        assert self.adapter.device(back) == self.adapter.device(value), f"{self.who}: unpack took another device"
        if type(self.adapter).pack is not Adapter.pack:
            took = self.adapter.nbytes(back)
            assert took <= size, f"{self.who}: unpack took {took} bytes for a value of {size}"

    def loading(self, parts: list[bytes]) -> Callable[[Any], None]:
        """Fills memory with the next part, and takes that away."""

        def load(memory: Any) -> None:
            view = memoryview(memory).cast("B")
            assert parts, f"{self.who}: unpack asked for more buffers than pack gave"
            part = parts.pop(0)
            same = len(view) == len(part)
            assert same, f"{self.who}: unpack asked for {len(view)} bytes of a buffer that has {len(part)}"
            view[:] = part

        return load

    def round_trip(self) -> None:
        cls = type(self.make())
        with registered(self.adapter, cls), Cache() as cache:
            made = ap(self.make)
            size = self.adapter.nbytes(self.make())
            assert cache.stats().used == size, f"{self.who}: the cache counts {cache.stats().used} bytes, not {size}"
            assert made.evict(), f"{self.who}: the value cannot be evicted"
            used = cache.stats().used
            assert used == 0, f"{self.who}: {used} bytes are still counted after eviction: something holds the value"
            assert self.equal(made.get(), self.make()), f"{self.who}: the value came back different"
            if self.view is not None and self.adapter.buffer(self.make()) is not None:
                seen = ap(self.view, made)
                assert cache.stats().used == size, f"{self.who}: a view counts as memory of its own"
                del seen
            del made
            used = cache.stats().used
            assert used == 0, f"{self.who}: {used} bytes are still counted when nothing is left"


@contextmanager
def registered(adapter: Adapter, *classes: type) -> Iterator[None]:
    """The adapter serves these types for a while."""
    known = _adapter._registered
    before = {cls: known.get(cls) for cls in classes}
    for cls in classes:
        _adapter.register(cls, adapter)
    try:
        yield
    finally:
        for cls, one in before.items():
            if one is None:
                known.pop(cls, None)
            else:
                known[cls] = one
        _adapter.kinds.clear()


def _references(holder: list[Any]) -> int:
    """To the only element: as many wherever it is asked, which is not so of a name, whose reference may be lent."""
    return getrefcount(holder[0])
