"""A generic recomputation cache: values remember how they were made, and a memory budget decides what to recompute.

The layers, from the top; imports run downwards only:

    surface      _recomputable (pure, ap, Recomputable); testing
    cache        _cache (settings, budget, stats); _context (the current one)
    runtime      _engine (the four callbacks); _at_once (short cuts); _runs (one run of an operation); _allocation
                 (room for what it makes); _turns (threads); _results (what it made); _lifetimes (release, forget, take
                 back); _repair (interrupts); _flight
    policy       _search and _tournament (candidates); _neighbours (evicted components); _policy (scores)
    memory       _pool (one device); _budget; _sizes (learnt); _verify (purity); _arguments
    graph        _graph (operation, storage, value); _events; _stats; _errors
    adapter      _adapter (the protocol and the registry); _python (plain objects)
"""

from recompute._adapters.adapter import Adapter, register, register_size, sizeof
from recompute._adapters.arrays import ArrayAdapter, Outline
from recompute._arrays.array import RecomputableArray
from recompute._arrays.namespace import namespace
from recompute._arrays.wrap import array, asarray, wrap
from recompute._budget import available
from recompute._cache import Cache
from recompute._context import current_cache, default_cache, set_default_cache
from recompute._engine.stats import Stats
from recompute._errors import BudgetError, ImpureError, StagingError
from recompute._recomputable import Recomputable, ap, lift, pure, sequence, traverse
from recompute._staging import stage

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "ArrayAdapter",
    "BudgetError",
    "Cache",
    "ImpureError",
    "Outline",
    "Recomputable",
    "RecomputableArray",
    "StagingError",
    "Stats",
    "ap",
    "array",
    "asarray",
    "available",
    "current_cache",
    "default_cache",
    "lift",
    "namespace",
    "pure",
    "register",
    "register_size",
    "sequence",
    "set_default_cache",
    "sizeof",
    "stage",
    "traverse",
    "wrap",
]
