"""Replaying recorded programs under other budgets and policies, for `from recompute.simulator import simulate`."""

from recompute._simulator.many import Job, simulate_many
from recompute._simulator.replay import Replay, baseline
from recompute._simulator.run import Run
from recompute._simulator.simulate import iterate, simulate
from recompute._simulator.varied import varied

__all__ = ["Job", "Replay", "Run", "baseline", "iterate", "simulate", "simulate_many", "varied"]
