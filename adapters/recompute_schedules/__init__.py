"""Checkpointing schedules for adjoint solvers, in bytes: what `checkpoint_schedules` has in numbers of checkpoints."""

from recompute_schedules._run import Result, run
from recompute_schedules._schedule import Schedule

__all__ = ["Result", "Schedule", "run"]
