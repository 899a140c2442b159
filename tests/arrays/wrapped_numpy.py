"""NumPy through `rc.namespace`, as a module that the public suite of the array API standard can import.

With EVICT=1 in the environment everything that can be evicted is, after every operation.
"""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np

import recompute as rc
import recompute_numpy
from recompute.events import Event, Performed

for _cls in (np.ndarray, np.generic):
    rc.adapters.register(_cls, recompute_numpy.adapter)
_cache = rc.Cache()
rc.set_default_cache(_cache)


def _evict_everything(event: Event) -> None:
    if isinstance(event, Performed) and not event.again:
        _cache.release_memory()


if os.environ.get("EVICT") == "1":
    _cache.subscribe(_evict_everything)
warnings.filterwarnings("ignore", category=RuntimeWarning)
sys.modules[__name__] = rc.namespace(np)
