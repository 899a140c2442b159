"""A generic recomputation cache: values remember how they were made, and a memory budget decides what to recompute.

The layers, from the top; imports run downwards only (tests/test_surface.py has every module, in order):

    command      _cli: the command `recompute`
    package      this file: what `import recompute` gives
    testing      testing: Identity, the conformance kit, the check of what a cache counts
    tools        _staging (a function recorded, planned and run as a straight line), _arrays (the transparent wrapper),
                 _pictures, _simulator (traces replayed through this cache), _plans (schedules made in advance),
                 _traces (recorded programs)
    surface      extend, events, policies (the engine and the policies for everybody above); _recomputable
                 (Recomputable, pure, ap); _applicative (lift, sequence, traverse); _cache (Cache); _context (which
                 cache is the current one)
    engine       _engine: requests (what is asked of the engine), engine (the four callbacks), recount (after an
                 interrupt)
    parts        _engine: settling, references, runs, results, moving, scheduler, memory, pool, frames, finalizer,
                 copies, meter, journal, changes
    policy       _policy: search and tournament (of the smallest score), needed and neighbourhoods (evicted components),
                 formulas
    graph        _engine: graph (operation, storage, value); arguments, sizes, verify, events, stats
    tiers        _tiers: where evicted bytes may go; disk, host memory
    protocol     _adapters: what the cache asks of a type of values, the registry, and plain Python objects
    base         _budget, _errors, _workers (processes)

Above the surface no module imports `_engine` or `_policy`: what they need is in `extend`, `events` and `policies`.
The public modules (`recompute.simulator`, ...) re-export names from private modules, and are loaded when used.
"""

from typing import TYPE_CHECKING

from recompute import _mixed_up as _mixed_up  # first of all: it refuses an installation that is two in one

# isort: split

from recompute._adapters.adapter import Adapter, register, register_size, sizeof
from recompute._adapters.arrays import ArrayAdapter, Outline
from recompute._applicative import lift, sequence, traverse
from recompute._arrays.array import RecomputableArray
from recompute._arrays.namespace import namespace
from recompute._arrays.wrap import array, asarray, wrap
from recompute._budget import available
from recompute._cache import Cache
from recompute._context import current_cache, default_cache, set_default_cache
from recompute._engine.stats import Stats
from recompute._errors import BudgetError, ImpureError, SizeWarning, StagingError, ThrashWarning
from recompute._recomputable import Recomputable, ap, pure
from recompute._staging.stage import stage
from recompute._tiers.disk import Disk
from recompute._tiers.host import Host

__version__ = "0.1.0"

if TYPE_CHECKING:
    from recompute import events as events
    from recompute import extend as extend
    from recompute import pictures as pictures
    from recompute import planners as planners
    from recompute import policies as policies
    from recompute import simulator as simulator
    from recompute import testing as testing
    from recompute import traces as traces

if not TYPE_CHECKING:  # to a checker, a module with this function has every attribute
    _MODULES = ("events", "extend", "pictures", "planners", "policies", "simulator", "testing", "traces")

    def __getattr__(name):
        """A public module, imported when it is asked for."""
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=import_module(__name__))

    def __dir__():
        return sorted({*globals(), *_MODULES})


__all__ = [
    "Adapter",
    "ArrayAdapter",
    "BudgetError",
    "Cache",
    "Disk",
    "Host",
    "ImpureError",
    "Outline",
    "Recomputable",
    "RecomputableArray",
    "SizeWarning",
    "StagingError",
    "Stats",
    "ThrashWarning",
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
