"""Schedules made in advance: `plan(program, 0.4)` says what to compute and to free; `verify` checks a plan."""

from recompute._plans.plan import METHODS, plan
from recompute._plans.schedule import Plan, PlanError
from recompute._plans.verify import verify

__all__ = ["METHODS", "Plan", "PlanError", "plan", "verify"]
