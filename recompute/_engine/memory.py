"""Memory: how many bytes each device holds, what may be evicted from it, and which storages to evict.

Room for what an operation makes is set aside before it runs, if it is free; what is short is told after the run.
It knows sizes, limits, candidates and evicted neighbourhoods, and returns victims; it never touches a payload. Under
the engine's lock, unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from recompute._budget import Limits
from recompute._engine.changes import shared
from recompute._engine.device_tiers import DeviceTiers
from recompute._engine.finalizer import Finalizer
from recompute._engine.frames import Frame
from recompute._engine.graph import EVICTED, NOWHERE, Held, Operation, Storage, Value, copy_of
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

Made: TypeAlias = "tuple[Any, int, int, str, bytes | None, Storage | None]"
"""One output of a run, measured: payload, bytes, identity of its memory (0: never shared), device, digest of its
content if the cache verifies, and the storage of the argument whose memory it is on."""

_NOTHING: Final[dict[Pool, int]] = {}


class Memory:
    """The pools of all devices, and what is evicted from them."""

    __slots__ = (
        "__weakref__",
        "_always_reserves",
        "_finalizer",
        "_newest",
        "advice",
        "closing",
        "counts_whole",
        "lenient",
        "limits",
        "machine",
        "neighbourhood",
        "only_declared",
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
        self._always_reserves = settings.room is not None
        self.only_declared = self.unlimited and not self._always_reserves
        """Whether nothing is reserved but for sizes that were declared: there is no budget."""
        self.lenient = settings.lenient
        """Whether what cannot fit is let in all the same, as an overshoot."""
        self.closing = False
        """Whether all goes back to the program: where sources take all the room, the rest has a budget beside them."""
        self.counts_whole = settings.counts_whole or tiers is not None  # what comes back from a tier shares nothing
        self.smallest = settings.smallest
        """Bytes: smaller storages are left alone."""
        self.pools: dict[str, Pool] = {}
        self._newest: Pool | None = None
        """The one that was asked for last."""
        self.storages: set[Storage] = set()
        """All that can still be needed, evicted ones too."""
        self.sizes = LearntSizes()
        self.advice: Advice | None = None
        self.story: Story | None = None
        """Told which victims are chosen; None: there is no log."""
        self.neighbourhood = NEIGHBOURHOODS[policy.neighbourhood](_cost_fell)
        self.neighbourhood.tiers = tiers is not None
        self.machine = Machine(self.neighbourhood)
        self.tiers = tiers
        """What is below the memory of the devices."""
        self._finalizer = finalizer

    def lie_above(self, tiers: Tiers) -> None:
        """Let evicted values move there. Before anything is made."""
        assert not self.pools, "values were made without tiers"
        self.tiers = tiers
        self.counts_whole = True
        self.neighbourhood.tiers = True

    def pool(self, device: str) -> Pool:
        """The pool of a device, made when it is first asked for. Also without the lock."""
        pool = self._newest
        if pool is not None and pool.device is device:  # nearly always
            return pool
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
        self._newest = pool
        return pool

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.unlimited = limits.given is None
        self.only_declared = self.unlimited and not self._always_reserves
        for pool in self.pools.values():
            pool.set_budget(limits.of(pool.device))

    def advise(self, advice: Advice | None) -> None:
        """Ask this advice, and the policy only where it does not know."""
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
            pool = self.pool(device)
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
            pool = self.pool(device)
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

    def reserve_for(self, frame: Frame, operation: Operation) -> bool:
        """Reserve room for what an operation makes, if that is known and fits."""
        if frame.reserved:
            return True
        if operation.runs:
            if operation.options is None:  # nearly always: one output, on memory of its own
                storage = operation.outputs[0].storage  # type: ignore[union-attr]  # there is one, since it runs
                pool, size = storage.pool, storage.size
                if storage.resident:
                    frame.needs = ()
                    return True
                if pool.used + size <= pool.limit and pool.adaptive is None:
                    self.machine.reserve(pool, size)
                    frame.reserved = ((pool, size),)
                    return True
            frame.needs = self.room_again(operation)
        elif self.only_declared and operation.options is None:
            return True
        return frame.needs is not None and self.reserve(frame, frame.needs)

    def shortage(self, frame: Frame, made: list[Made]) -> dict[Pool, int]:
        """The bytes of outputs that do not fit, beyond what was reserved for them."""
        operation = frame.operation
        assert operation is not None
        if len(made) == 1:  # nearly always
            _, size, _, device, _, shares = made[0]
            pool = self.pool(device)
            extra = size
            for reserved, room in frame.reserved:
                if reserved is pool:
                    extra -= room
            if extra <= 0 or pool.used + extra <= pool.limit or (shares is not None and shares.resident):
                return _NOTHING
            return {pool: extra}
        if operation.runs:
            wanted = [output is not None and output.payload is EVICTED for output in operation.outputs]
            made = [output for output, needed in zip(made, wanted, strict=True) if needed]
        made = [one if one[5] is None or one[5].resident else (*one[:5], None) for one in made]
        short: dict[Pool, int] = {}
        for pool, size in self.by_pool(own_memory(made)).items():
            extra = size - sum([room for reserved, room in frame.reserved if reserved is pool])
            if extra > 0 and pool.used + extra > pool.limit:
                short[pool] = extra
        return short

    # Leaving memory and coming back

    def victims(self, pool: Pool, size: int, now: float) -> list[Storage]:
        """Which storages to evict, best first, so that `size` more bytes fit.

        Nothing where that cannot be reached, for nothing is evicted in vain; lenient memory comes as close as it can,
        but not so close that what is made while all goes back has no room: each step would evict what the next needs.
        """
        if pool.fixed + pool.held + size > pool.limit and (
            not self.lenient or (self.closing and pool.used + size <= pool.limit + pool.sources)
        ):
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


def own_memory(made: Sequence[Made]) -> list[tuple[str, int]]:
    """(device, bytes) of the outputs that share no memory with an argument; of those that share it, the largest."""
    if len(made) == 1:
        _, size, _, device, _, shares = made[0]
        return [(device, size)] if size and shares is None else []
    own: dict[int, tuple[str, int]] = {}
    for number, (_, size, buffer, device, _, shares) in enumerate(made):
        if shares is None:
            where = buffer or -number
            own[where] = (device, max(size, own[where][1]) if where in own else size)
    return [(device, size) for device, size in own.values() if size]


def is_expected(made: Sequence[Made], needs: Sequence[tuple[str, int]] | None) -> bool:
    """Whether the outputs of a run need what was expected; nearly always one that has memory of its own does."""
    if len(made) == 1 and needs is not None and len(needs) == 1:
        _, size, _, device, _, shares = made[0]
        name, expected = needs[0]
        return size == expected and size > 0 and shares is None and device == name
    return own_memory(made) == needs
