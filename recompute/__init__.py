"""A generic recomputation cache: values remember how they were made, and a memory budget decides what to recompute.

The layers, from the top; imports run downwards only (tests/test_surface.py has every module, in order):

    command      _cli: the command `recompute`
    package      this file: what `import recompute` gives
    testing      testing: Identity, the conformance kit, the check of what a cache counts
    tools        _staging (`planned`: a function recorded, planned and run as a straight line), _arrays (the transparent
                 wrapper), _pictures, _simulator (traces replayed through this cache), _plans (schedules made in
                 advance), _traces (recorded programs)
    surface      extend, events, policies (the engine and the policies for all above); _recomputable (Recomputable,
                 pure, ap); _applicative (lift, sequence, traverse); _memoize; _cache (Cache); _context (which cache is
                 the current one)
    engine       _engine: requests (what is asked of the engine), engine (the four callbacks), recount (after an
                 interrupt)
    parts        _engine: settling, references, runs, results, moving, scheduler, memory, machine, pool, frames,
                 journal, meter, stats, finalizer, changes
    graph        _engine: graph (operation, storage, value); neighbours, needed (what is evicted around a storage);
                 arguments, sizes, verify, events, randomness
    policy       _policy, a leaf (numbers in, victim out): search and tournament (of the smallest score), formulas
    tiers        _tiers: where evicted bytes may go; disk, host memory
    protocol     _adapters: what the cache asks of a type of values, the registry, and plain Python objects
    base         _form (compiled or plain: some modules of the engine and the policy are compiled when the library is
                 installed), _budget, _errors, text (tables, names, warnings)

Above the surface no module imports `_engine` or `_policy`: what they need is in `extend`, `events` and `policies`.
The public modules (`recompute.simulator`, ...) re-export names from private modules, and are loaded when used.
"""

from typing import TYPE_CHECKING

from recompute import _form as _form  # first of all: it chooses the form of what follows, compiled or plain

# isort: split

from recompute._adapters.adapter import register_size, sizeof
from recompute._applicative import lift, sequence, traverse
from recompute._budget import available
from recompute._cache import Cache
from recompute._context import current_cache, default_cache, set_default_cache
from recompute._engine.stats import Stats
from recompute._errors import BudgetError, ImpureError, RandomWarning, SizeWarning, StagingError, ThrashWarning
from recompute._recomputable import Recomputable, ap, pure

_form.check()

__version__ = "0.2.0"

if TYPE_CHECKING:
    from recompute import adapters as adapters
    from recompute import events as events
    from recompute import extend as extend
    from recompute import pictures as pictures
    from recompute import planners as planners
    from recompute import policies as policies
    from recompute import simulator as simulator
    from recompute import testing as testing
    from recompute import text as text
    from recompute import traces as traces
    from recompute._arrays.array import RecomputableArray as RecomputableArray
    from recompute._arrays.namespace import array as array
    from recompute._arrays.namespace import namespace as namespace
    from recompute._memoize import memoize as memoize
    from recompute._sight.report import report as report
    from recompute._staging.planned import planned as planned
    from recompute._staging.planned import stage as stage
    from recompute._tiers.disk import Disk as Disk
    from recompute._tiers.host import Host as Host

if not TYPE_CHECKING:  # to a checker, a module with this function has every attribute
    _MODULES = (
        *("adapters", "events", "extend", "pictures", "planners", "policies", "simulator", "testing", "text", "traces"),
    )
    _WHERE = {
        "array": "_arrays.namespace",
        "RecomputableArray": "_arrays.array",
        "namespace": "_arrays.namespace",
        "memoize": "_memoize",
        "report": "_sight.report",
        **dict.fromkeys(("planned", "stage"), "_staging.planned"),
        "Disk": "_tiers.disk",
        "Host": "_tiers.host",
    }

    def __getattr__(name):
        """What not every program needs is imported when it is asked for: public modules, and these names."""
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name in _WHERE:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
            return value
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=import_module(__name__))

    def __dir__():
        return sorted({*globals(), *_MODULES, *_WHERE})


__all__ = [
    "BudgetError",
    "Cache",
    "Disk",
    "Host",
    "ImpureError",
    "RandomWarning",
    "Recomputable",
    "RecomputableArray",
    "SizeWarning",
    "StagingError",
    "Stats",
    "ThrashWarning",
    "ap",
    "array",
    "available",
    "current_cache",
    "default_cache",
    "lift",
    "memoize",
    "namespace",
    "planned",
    "pure",
    "register_size",
    "report",
    "sequence",
    "set_default_cache",
    "sizeof",
    "stage",
    "traverse",
]
