"""Policies and searches as objects, to choose their parameters: `Cache(policy=Random(seed=3), search=Batch(4.0))`."""

from recompute._policy.formulas import Dtr, DtrEq, DtrLocal, Lru, Msps, Needed, Nothing, Policy, Random, Scored, Size
from recompute._policy.search import Batch, Exact, IgnoreSmall, Sample, Search

__all__ = [
    "Batch",
    "Dtr",
    "DtrEq",
    "DtrLocal",
    "Exact",
    "IgnoreSmall",
    "Lru",
    "Msps",
    "Needed",
    "Nothing",
    "Policy",
    "Random",
    "Sample",
    "Scored",
    "Search",
    "Size",
]
