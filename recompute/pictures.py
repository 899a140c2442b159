"""Pictures of what a cache did, and of what policies and planners cost (the extra `plot`)."""

from recompute._pictures.bars import Moment, moments, plan_events
from recompute._pictures.chain import REGIMES, ChainPoint, chain_cost
from recompute._pictures.memory import memory
from recompute._pictures.overheads import Floor, Point, accesses, overhead
from recompute._pictures.residency import residency
from recompute._pictures.style import save

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
