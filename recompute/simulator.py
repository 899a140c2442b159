"""Replaying recorded programs under other budgets and policies, for `from recompute.simulator import simulate`."""

from recompute._simulator.many import Job, simulate_many
from recompute._simulator.published_replay import baseline
from recompute._simulator.replay import Replay
from recompute._simulator.run import Run
from recompute._simulator.simulate import iterate, simulate

__all__ = ["Job", "Replay", "Run", "baseline", "iterate", "simulate", "simulate_many"]
