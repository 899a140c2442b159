"""Allocation: room for what operations make: others evicted until it is there, reserved, then taken.

`_allocate` is one of the four callbacks (see _engine). Under the cache's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from recompute._budget import Limits
from recompute._engine.arguments import fill
from recompute._engine.frames import ON_THE_GROUND, Flight, Frame, Made, Room
from recompute._engine.graph import EVICTED, Operation, ReleaseMode, Storage
from recompute._engine.memory import Pool
from recompute._engine.results import own_memory
from recompute._engine.scheduler import Turns
from recompute._engine.sizes import LearntSizes
from recompute._policy.formulas import Policy
from recompute._policy.search import Search


class Allocation(Turns):
    """Keeps what is in memory within the limits."""

    def __init__(self, limits: Limits, policy: Policy, search: Search, release: ReleaseMode, verify: bool) -> None:
        super().__init__(limits, policy, search, release, verify)
        self._sizes = LearntSizes()

    def _allocate(self, pool: Pool, size: int, flight: Flight, what: Operation | None) -> bool:
        """Evict until `size` more bytes fit; False if the frame on top lost its locks while it waited for others."""
        while pool.used + size > pool.refresh():
            fits = pool.fixed + pool.held + size <= pool.limit
            victims = pool.candidates.choose(self.now) if fits else []
            if victims and self.policy.reprieves:
                victims = self._spare(pool, size, victims)
            for victim in victims:
                self._evict(victim, "pressure")
            if not victims:
                self._make_way(pool, size, flight, what)
                if flight.frames and flight.frames[-1].todo is None:
                    return False
        return True

    def _spare(self, pool: Pool, size: int, victims: list[Storage]) -> list[Storage]:
        """Choose until `size` bytes fit; of all victims those that are really necessary, the first ones first."""
        if pool.used - sum(each.size for each in victims) + size <= pool.limit:
            return victims
        chosen: list[Storage] = []
        while victims:
            for each in victims:
                self._set_aside(each)
            chosen += victims
            victims = pool.candidates.choose(self.now) if pool.used + size > pool.limit else []
        spared: set[Storage] = set()
        if pool.used + size <= pool.limit:
            for each in reversed(chosen):
                if pool.used + each.size + size <= pool.limit:
                    self._put_back(each)
                    spared.add(each)
        doomed = [each for each in chosen if each not in spared]
        for each in doomed:
            self._put_back(each)
        return doomed

    def _reserve(self, frame: Frame, operation: Operation) -> bool:
        """Make room for the outputs, as far as their sizes are known; False if the arguments must be locked again."""
        expected = self._expected(frame, operation)
        if len(expected) > 1:
            together: dict[str, int] = {}
            for device, size in expected:
                together[device] = together.get(device, 0) + size
            expected = list(together.items())
        for device, size in expected:
            pool = self._pools.get(device) or self._pool(device)
            tight = pool.used + size > pool.limit or pool.adaptive is not None
            if tight and not self._allocate(pool, size, frame.flight, operation):
                self._give_back(frame.reserved)
                frame.reserved = ()
                return False
            pool.take(size)
            pool.fixed += size
            frame.reserved += ((pool, size),)
        frame.running = True
        frame.born = self._number
        self._executing += 1
        return True

    def _expected(self, frame: Frame, operation: Operation) -> Sequence[tuple[str, int]]:
        """(device, bytes) of the outputs: as before, as declared, or as learnt; empty if unknown."""
        if operation.runs:
            if operation.room is not None:  # the function makes all of them again, whichever are wanted
                return operation.room
            storage = next(each.storage for each in operation.outputs if each is not None)
            return () if storage.resident else ((storage.pool.device, storage.size),)
        if operation.declared is not None:
            device = operation.arguments[0].storage.pool.device if operation.arguments else "cpu"
            return [(device, size) for size in operation.declared]
        if self._unlimited:
            return ()
        keywords = operation.keywords
        named = None if keywords is None else dict(zip(keywords, fill(keywords.values()), strict=True))
        frame.key = self._sizes.key(operation.function, fill(operation.positional), named, operation.nout or 1)
        return self._sizes.get(frame.key, operation)

    def _make_room_now(
        self, reserved: Room, operation: Operation, made: list[Made], homes: list[Storage | None]
    ) -> None:
        """Turn the room reserved into room for what was made; if that is more, evict after the fact."""
        if reserved:
            self._give_back(reserved)
            pool, size = reserved[0]
            if len(made) == 1 and made[0][1] <= size and made[0][3] == pool.device:
                return  # the ordinary case: the size was known
        if self._unlimited:
            return
        if operation.runs:
            wanted = [each is not None and each.payload is EVICTED for each in operation.outputs]
            made = [each for each, needed in zip(made, wanted, strict=True) if needed]
            homes = [each for each, needed in zip(homes, wanted, strict=True) if needed]
        needs: dict[Pool, int] = {}
        for device, size in own_memory(made, homes):
            pool = self._pool(device)
            needs[pool] = needs.get(pool, 0) + size
        for pool, size in needs.items():
            if pool.used + size > pool.limit and size > sum(room for one, room in reserved if one is pool):
                pool.overshoot = max(pool.overshoot, pool.used + size - int(pool.limit))
                pool.peak = max(pool.peak, pool.used + size)
                self._allocate(pool, size, ON_THE_GROUND, operation)
