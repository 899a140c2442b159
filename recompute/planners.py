"""Schedules made in advance: `plan(program, 0.4)` says what to compute and to free; `verify` checks a plan."""

from recompute._plans._plan import METHODS, plan
from recompute._plans._schedule import Plan, PlanError
from recompute._plans._verify import verify

__all__ = ["METHODS", "Plan", "PlanError", "plan", "verify"]
