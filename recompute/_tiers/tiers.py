"""The tiers of a cache, by device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recompute._tiers.tier import Store, Tier


class Tiers:
    """The tiers of a cache, opened: for every device, or for some. Raises TypeError for other objects, and OSError."""

    def __init__(self, given: Any) -> None:
        self._everywhere: Sequence[Store] = ()
        self._devices: dict[str, Sequence[Store]] = {}
        if isinstance(given, Mapping):
            checked = {device: _checked(listed, f"the tiers of {device!r}") for device, listed in given.items()}
            self._devices = {device: _opened(listed) for device, listed in checked.items()}
        else:
            self._everywhere = _opened(_checked(given, "tiers"))

    def of(self, device: str) -> Sequence[Store]:
        """The stores below the memory of a device, the fastest first."""
        return self._devices.get(device, self._everywhere)

    def all(self) -> list[tuple[str | None, Store]]:
        """Each store, with its device; None: every device."""
        found: list[tuple[str | None, Store]] = [(None, store) for store in self._everywhere]
        return found + [(device, store) for device, stores in self._devices.items() for store in stores]

    def before_fork(self) -> None:
        """There will be a child process."""
        for _, store in self.all():
            store.before_fork()

    def after_fork(self, *, child: bool) -> None:
        """There is one: this one, or not."""
        for _, store in self.all():
            store.after_fork(child=child)


def _checked(given: Any, what: str) -> list[Tier]:
    tiers = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else [given]
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise TypeError(f"{what} are such as rc.Disk('50GB') or rc.Host('64GB'), not {tier!r}")
    return tiers


def _opened(tiers: Iterable[Tier]) -> list[Store]:
    return [tier.open() for tier in tiers]
