"""Policies and searches as objects, to choose their parameters: `Cache(policy=Random(seed=3), search=Batch(4.0))`.

`POLICIES` and `SEARCHES` are those with a name, `DEFAULT` is the name of the default policy, a `ReleaseMode` that of
what becomes of a value to which nothing refers; `policy_of` and `search_of` give the object that an argument of
`Cache` stands for.
"""

from recompute._engine.graph import ReleaseMode
from recompute._policy.formulas import (
    DEFAULT,
    POLICIES,
    Dtr,
    DtrEq,
    DtrLocal,
    Lru,
    Msps,
    Needed,
    Nothing,
    Policy,
    PolicyName,
    Random,
    Score,
    Scored,
    Size,
    policy_of,
)
from recompute._policy.search import SEARCHES, Batch, Exact, IgnoreSmall, Sample, Search, SearchName, search_of

__all__ = [
    "DEFAULT",
    "POLICIES",
    "SEARCHES",
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
    "PolicyName",
    "Random",
    "ReleaseMode",
    "Sample",
    "Score",
    "Scored",
    "Search",
    "SearchName",
    "Size",
    "policy_of",
    "search_of",
]
