"""What to do next at the start of a step: the question that every plan answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from checkpoint_schedules import StorageType


class Kind(Enum):
    """What a forward advance leaves in a storage."""

    STATE = "restart data of its first step"
    DEPS = "adjoint dependencies of its one step"
    NOTHING = "nothing: the restart data of its first step are in the storage already"
    LAST = "nothing: the step is reversed at once"


@dataclass(frozen=True)
class Choice:
    """Advance to a step, and store this there."""

    kind: Kind
    stop: int
    where: StorageType = StorageType.WORK


@dataclass(frozen=True)
class Prices:
    """Seconds, or steps, that the disk takes for restart data and for adjoint dependencies."""

    write_state: float = 0.0
    read_state: float = 0.0
    write_deps: float = 0.0
    read_deps: float = 0.0
    overlap: bool = False
    """Writes go on while the forward does: only what takes longer than the steps to the next action counts."""

    def divided(self, unit: float) -> Prices:
        """In other units."""
        return Prices(
            self.write_state / unit, self.read_state / unit, self.write_deps / unit, self.read_deps / unit, self.overlap
        )


class Plan(Protocol):
    """Where to put checkpoints."""

    def choose(self, start: int, stop: int, ram: int, disk: int, kept: StorageType) -> Choice:
        """What to do with the forward at `start` and the adjoint at `stop`, and so many bytes free.

        `kept`: where the restart data of `start` are: then they count as free. NONE: only in working memory.
        """
