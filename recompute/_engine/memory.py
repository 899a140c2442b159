"""Memory: how many bytes each device holds, what may be evicted from it, and which storages to evict.

It knows sizes, limits, candidates and evicted neighbourhoods, and returns victims; it never touches a payload. Under
the engine's lock, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recompute._budget import Limits
from recompute._engine.changes import shared
from recompute._engine.device_tiers import DeviceTiers
from recompute._engine.finalizer import Finalizer, Held
from recompute._engine.graph import NOWHERE, Operation, Storage, Value, copy_of
from recompute._engine.machine import Machine
from recompute._engine.needed import NEIGHBOURHOODS
from recompute._engine.options import Settings
from recompute._engine.pool import Pool
from recompute._engine.sizes import LearntSizes
from recompute._engine.states import DROPPED, MOVED
from recompute._policy.formulas import Policy
from recompute._policy.search import Search, candidates
from recompute._tiers.tiers import Tiers

if TYPE_CHECKING:
    from recompute._engine.advice import Advice
    from recompute._engine.frames import Frame
    from recompute._engine.story import Story


class Memory:
    """The pools of all devices, and what is evicted from them."""

    __slots__ = (
        "__weakref__",
        "_finalizer",
        "advice",
        "lenient",
        "limits",
        "machine",
        "neighbourhood",
        "policy",
        "pools",
        "search",
        "sizes",
        "smallest",
        "storages",
        "story",
        "tiers",
        "unlimited",
    )

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        search: Search,
        finalizer: Finalizer,
        tiers: Tiers | None,
        settings: Settings,
    ) -> None:
        self.policy = policy
        self.search = search
        self.limits = limits
        self.unlimited = limits.given is None
        self.lenient = settings.lenient
        """Whether what cannot fit is let in all the same, as an overshoot."""
        self.smallest = settings.smallest
        """Bytes: smaller storages are left alone."""
        self.pools: dict[str, Pool] = {}
        self.storages: set[Storage] = set()
        """All that somebody can still need, evicted ones too."""
        self.sizes = LearntSizes()
        self.advice: Advice | None = None
        self.story: Story | None = None
        """Told which victims are chosen, if somebody wants to know."""
        self.neighbourhood = NEIGHBOURHOODS[policy.neighbourhood](_cost_fell)
        self.neighbourhood.tiers = tiers is not None
        self.machine = Machine(self.neighbourhood)
        self.tiers = tiers
        """What is below the memory of the devices."""
        self._finalizer = finalizer

    def lie_above(self, tiers: Tiers) -> None:
        """What is evicted may move there from now on. Before anything is made."""
        assert not self.pools, "values were made without tiers"
        self.tiers = tiers
        self.neighbourhood.tiers = True

    def pool(self, device: str) -> Pool:
        """The pool of a device, made when it is first asked for. Also without the lock."""
        pool = self.pools.get(device)
        if pool is None:
            shared.calls_python()
            found = candidates(self.search, self.policy, self.neighbourhood)
            pool = Pool(device, found, self.limits.of(device))
            pool.smallest = self.smallest
            stores = () if self.tiers is None else self.tiers.of(device)
            if stores:
                pool.tiers = found.tiers = DeviceTiers(stores, self, self._finalizer)
            pool = self.pools.setdefault(device, pool)  # another thread may have been faster
        return pool

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.unlimited = limits.given is None
        for pool in self.pools.values():
            pool.set_budget(limits.of(pool.device))

    def advise(self, advice: Advice | None) -> None:
        """Ask this advice from now on, and the policy only where it does not know."""
        self.advice = advice
        if advice is not None:
            self.neighbourhood.rest(self.storages)
            for pool in self.pools.values():
                pool.candidates.rest()

    # Room for what operations make

    def room_again(self, operation: Operation) -> Sequence[tuple[str, int]]:
        """(device, bytes) that the outputs of a repeated run need."""
        options = operation.options
        if options is not None and options.room is not None:  # all are made again, whichever are wanted
            return options.room
        storage = next(output.storage for output in operation.outputs if output is not None)
        return () if storage.resident else ((storage.pool.device, storage.size),)

    def by_pool(self, needs: Sequence[tuple[str, int]]) -> dict[Pool, int]:
        """(device, bytes) summed up. Also without the lock."""
        by_pool: dict[Pool, int] = {}
        for device, size in needs:
            pool = self.pools.get(device) or self.pool(device)
            by_pool[pool] = by_pool.get(pool, 0) + size
        return by_pool

    def too_small_for(self, values: Sequence[Value]) -> tuple[Pool, int] | None:
        """A pool that cannot have these values at once, whatever goes, and the bytes of those that may be evicted."""
        needed: dict[Pool, int] = {}
        for storage in {value.storage for value in values} - {NOWHERE}:
            needed[storage.pool] = needed.get(storage.pool, 0) + storage.size
        for pool, size in needed.items():
            if size > pool.limit:
                locked = {value.storage for value in values if value.storage.locks and value.storage.pool is pool}
                return pool, size - sum(storage.size for storage in locked)
        return None

    def reserve(self, frame: Frame, needs: Sequence[tuple[str, int]]) -> bool:
        """Set bytes aside for the outputs of an operation, if they fit without an eviction."""
        if not needs:
            return True
        if len(needs) == 1:  # nearly always
            ((device, size),) = needs
            pool = self.pools.get(device) or self.pool(device)
            if pool.used + size > pool.limit or pool.adaptive is not None:
                return False
            self.machine.reserve(pool, size)
            frame.reserved += ((pool, size),)
            return True
        by_pool = self.by_pool(needs)
        for pool, size in by_pool.items():
            if pool.used + size > pool.limit or pool.adaptive is not None:
                return False
        for pool, size in by_pool.items():
            self.machine.reserve(pool, size)
            frame.reserved += ((pool, size),)
        return True

    # Leaving memory and coming back

    def victims(self, pool: Pool, size: int, now: float) -> list[Storage]:
        """Which storages to evict, best first, so that `size` more bytes fit.

        Nothing where that cannot be reached, for nothing is evicted in vain; lenient memory comes as close as it can.
        """
        if not self.lenient and pool.fixed + pool.held + size > pool.limit:
            return []
        if self.advice is not None:
            victims = self.advice.victims(pool, size)
            if self.smallest > 1:
                victims = [victim for victim in victims if victim.size >= self.smallest]
            if victims:
                return victims
        victims = self._choose(pool, now)
        if victims and self.policy.prunes_victims:
            return self._pruned(pool, size, now, victims)
        return victims

    def _choose(self, pool: Pool, now: float) -> list[Storage]:
        victims = pool.candidates.choose(now)
        if self.story is not None:
            self.story.chosen(victims, pool.candidates, now)
        return victims

    def _pruned(self, pool: Pool, size: int, now: float, victims: list[Storage]) -> list[Storage]:
        """Choose until `size` bytes fit; of all victims those that are really necessary, the first ones first."""
        used = pool.used - pool.departing + size
        for victim in victims:
            used -= victim.size
        if used <= pool.limit:
            return victims
        limit = pool.limit + pool.departing
        chosen: list[Storage] = []
        buffers: dict[Storage, int] = {}
        while victims:
            for victim in victims:
                buffers[victim] = victim.buffer
                self.evicted(victim, "pressure")
            chosen += victims
            victims = self._choose(pool, now) if pool.used + size > limit else []
        kept: set[Storage] = set()
        if pool.used + size <= limit:
            for victim in reversed(chosen):
                if pool.used + victim.size + size <= limit:
                    self.machine.come_back(victim, "not necessary")
                    kept.add(victim)
        necessary = [victim for victim in chosen if victim not in kept]
        for victim in necessary:
            self.machine.come_back(victim, "not necessary")
        for victim in chosen:
            victim.buffer = buffers[victim]  # it has never left
        return necessary

    def evicted(self, storage: Storage, why: str) -> None:
        """A storage leaves at once that can be made again, or of which a tier has a copy."""
        self.machine.move(storage, DROPPED if storage.pool.tiers is None or copy_of(storage) is None else MOVED, why)

    def add_cost(self, storage: Storage, change: float) -> None:
        """What it takes to make a storage has changed."""
        storage.cost = max(0.0, storage.cost + change)
        if not storage.resident:
            self.neighbourhood.own_cost_changed(storage, change)
        elif storage.slot >= 0:
            storage.pool.candidates.changed(storage)

    def held_as(self, buffer: int, size: int) -> Held | None:
        """What is held outside and is this buffer. O(held). Also without the lock."""
        return next((held for held in list(self.machine.held) if held.buffer == buffer and held.size == size), None)

    def __repr__(self) -> str:
        return f"<memory: {', '.join(map(repr, self.pools.values()))}>"


def _cost_fell(storage: Storage) -> None:
    """A neighbourhood's cost fell: the search must know at once."""
    storage.pool.candidates.changed(storage)


def shared_storage(values: Sequence[Any], buffer: int) -> Storage | None:
    """The storage among those of `values` whose memory an output shares."""
    if buffer:
        for value in values:
            if value is not None and value.storage.buffer == buffer:
                return value.storage  # type: ignore[no-any-return]  # values are nodes
    return None
