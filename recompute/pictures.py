"""Pictures of what a cache did, and of what policies and planners cost (the extra `plot`)."""

from recompute._pictures._accesses import accesses
from recompute._pictures._bars import Moment, moments
from recompute._pictures._chain import REGIMES, ChainPoint, chain_cost
from recompute._pictures._memory import memory
from recompute._pictures._overhead import overhead
from recompute._pictures._planned import plan_events
from recompute._pictures._points import Floor, Point
from recompute._pictures._residency import residency
from recompute._pictures._style import save

__all__ = [
    "REGIMES",
    "ChainPoint",
    "Floor",
    "Moment",
    "Point",
    "accesses",
    "chain_cost",
    "memory",
    "moments",
    "overhead",
    "plan_events",
    "residency",
    "save",
]
