"""Reservations: room for what an operation makes, set aside before it runs if it is free, and what is short after it.

Under the lock, unless a method says otherwise.
"""

from __future__ import annotations

from typing import Final

from recompute._budget import Limits
from recompute._engine.frames import Frame
from recompute._engine.graph import EVICTED, Operation
from recompute._engine.memory import Memory
from recompute._engine.pool import Pool
from recompute._engine.results import Made, own_memory

_NOTHING: Final[dict[Pool, int]] = {}


class Reservations:
    """Sets room aside for the outputs of operations."""

    __slots__ = ("_always", "_memory", "only_declared")

    def __init__(self, memory: Memory, always: bool) -> None:
        self._memory = memory
        self._always = always
        self.only_declared = not always and memory.unlimited
        """Whether nothing is reserved but for sizes that were declared: there is no budget."""

    def set_limits(self, limits: Limits) -> None:
        """Another budget from now on; nothing is evicted yet."""
        self._memory.set_limits(limits)
        self.only_declared = not self._always and self._memory.unlimited

    def reserve(self, frame: Frame, operation: Operation) -> bool:
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
                    self._memory.machine.reserve(pool, size)
                    frame.reserved = ((pool, size),)
                    return True
            frame.needs = self._memory.room_again(operation)
        elif self.only_declared and operation.options is None:
            return True
        return frame.needs is not None and self._memory.reserve(frame, frame.needs)

    def shortage(self, frame: Frame, made: list[Made]) -> dict[Pool, int]:
        """The bytes of outputs that do not fit, beyond what was reserved for them."""
        operation, memory = frame.operation, self._memory
        assert operation is not None
        if len(made) == 1:  # nearly always
            _, size, _, device, _, shares = made[0]
            pool = memory.pool(device)
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
        for pool, size in memory.by_pool(own_memory(made)).items():
            extra = size - sum([room for reserved, room in frame.reserved if reserved is pool])
            if extra > 0 and pool.used + extra > pool.limit:
                short[pool] = extra
        return short
