"""Advice: what somebody who knows what comes next may tell the engine. It is free to be wrong."""

from __future__ import annotations

from typing import Protocol

from recompute._engine.graph import Storage
from recompute._engine.pool import Pool


class Advice(Protocol):
    """Asked under the lock."""

    def victims(self, pool: Pool, size: int) -> list[Storage]:
        """Storages to evict, so that `size` more bytes fit: resident and unlocked ones; empty if it does not know."""

    def keeps(self, storage: Storage) -> bool:
        """Whether a storage that nobody refers to any more should stay all the same."""
