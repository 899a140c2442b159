"""Dask for recompute: its threaded scheduler within a budget, and workers that recompute or spill.

    get, budget, stats      the scheduler, for every collection of Dask's in this process
    least                   what a graph needs at once, before it runs
    Worker, Nanny           for a cluster (dask.distributed, which is imported when they are used)

The layers, from the top: _scheduler and _worker; _joined (arrays that are put together); _values (what a worker holds);
_running (what is evicted last, and what runs alone); _recipe (a task as a function of its arguments); _payloads (what
tasks are given, and what they return); _opened (graphs, opened, and what they need); _metadata (tasks, read).
"""

from typing import TYPE_CHECKING

from recompute_dask import _installed as _installed  # first: it says what is wrong
from recompute_dask._opened import least
from recompute_dask._scheduler import budget, get, stats

if TYPE_CHECKING:
    from recompute_dask._worker import Nanny as Nanny
    from recompute_dask._worker import Worker as Worker

__all__ = ["Nanny", "Worker", "budget", "get", "least", "stats"]

if not TYPE_CHECKING:  # to a checker, a module with this function has every attribute

    def __getattr__(name):
        if name in ("Nanny", "Worker"):
            from recompute_dask import _worker

            return getattr(_worker, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
