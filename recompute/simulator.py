"""Replaying recorded programs under other budgets and policies, for `from recompute.simulator import simulate`."""

from recompute._simulator.many import Job, simulate_many
from recompute._simulator.replay import Replay, Run, baseline, simulate

__all__ = ["Job", "Replay", "Run", "baseline", "simulate", "simulate_many"]
