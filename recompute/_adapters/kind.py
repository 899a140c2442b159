"""An adapter resolved for one type: which of its methods there is any need to call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recompute._adapters.adapter import Adapter
    from recompute._adapters.arrays import ArrayAdapter


class Kind:
    """What to ask of values of one type: methods of their adapter, None where there is nothing to call."""

    __slots__ = (
        "adapter",
        "array",
        "atomic",
        "buffer",
        "content",
        "destroyed",
        "device",
        "enter",
        "evicted",
        "freeze",
        "handle",
        "inert",
        "nbytes",
        "outlines",
        "outlive",
        "part_of_result",
        "plain",
        "readonce",
        "remember",
        "restored",
        "signature",
        "silent",
        "timer",
        "vacate",
        "watch",
    )

    adapter: Adapter
    array: ArrayAdapter | None
    """The adapter, if it serves arrays."""
    nbytes: Callable[[Any], int]
    part_of_result: Callable[[Any], int] | None
    """The bytes of a part of a result; raises Misfit for what cannot be kept. None: as for plain Python objects."""
    signature: Callable[[Any], Hashable] | None
    """None: the value itself."""
    buffer: Callable[[Any], object | None] | None
    device: Callable[[Any], str] | None
    timer: Callable[[str], Callable[[], Callable[[], float | None]] | None] | None
    freeze: Callable[[Any], None] | None
    enter: Callable[[Any], tuple[int, object | None]] | None
    watch: Callable[[Any], object | None] | None
    evicted: Callable[[Any], Any] | None
    destroyed: Callable[[Any], str | None] | None
    vacate: Callable[[Any], None] | None
    outlive: Callable[[Any], bool] | None
    """None: a reference is enough."""
    restored: Callable[[Any, Any], None] | None
    remember: Callable[[Any], Callable[[], Any] | None] | None
    silent: bool
    """An eviction is no news to it."""
    outlines: bool
    """All that it wants of an evicted value is the outline, for a Recomputable that reads it."""
    content: bool
    """A container or an array: its methods are those of what is in it."""
    readonce: bool
    handle: bool
    """A Recomputable."""
    inert: int
    """1: it holds no generator of random numbers, as far as one would be looked for; -1: it may; 0: not known yet."""
    plain: bool
    """As an argument: nothing to remember, no container and no Recomputable, which an operation has to look into."""
    atomic: bool


class Kinds:
    """Type -> Kind, resolved on first sight."""

    __slots__ = ("_known", "_resolve")

    def __init__(self, resolve: Callable[[type], tuple[Kind, bool]]) -> None:
        self._known: dict[type, Kind] = {}
        self._resolve = resolve
        """Gives the kind of a type, and whether that is to be remembered."""

    def get(self, cls: type) -> Kind | None:
        """None: it was not asked for yet. Asks no adapter."""
        return self._known.get(cls)

    def __getitem__(self, cls: type) -> Kind:
        return self.of(cls)

    def of(self, cls: type) -> Kind:
        """The same, as compiled code calls it."""
        kind = self._known.get(cls)
        if kind is None:
            kind, known = self._resolve(cls)
            if known:
                self._known[cls] = kind
        return kind

    def clear(self) -> None:
        """Have all of them resolved again."""
        self._known.clear()
