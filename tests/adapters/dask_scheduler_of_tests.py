"""A plug-in of pytest: whatever asks Dask for a scheduler of this process gets the one that is named here.

    python -m pytest -p dask_scheduler_of_tests --pyargs dask.array

DASK_SCHEDULER is `threads` (Dask's own, to compare with), `recompute`, or `evicted`: the latter also evicts everything
after each task. So Dask's own tests test `recompute_dask.get` (.ci/dask).
"""

from __future__ import annotations

import os
from typing import Any

import dask
import dask.base
import dask.threaded

import recompute_dask as rd
from recompute_dask._recipe import Held

NAMES = ("sync", "synchronous", "single-threaded", "threads", "threading", dask.local.get_sync, dask.threaded.get)


def get_evicted(dsk: Any, keys: Any, **options: Any) -> Any:
    """As `recompute_dask.get`, with everything evicted after each task."""

    def evict(key: Any, result: Any, dsk: Any, state: Any, worker: Any) -> None:
        for dependency in (key, *state["dependencies"][key]):
            value = state["cache"].get(dependency)
            if isinstance(value, Held):
                value.evict()

    callbacks = options.pop("callbacks", None)
    callbacks = list(dask.callbacks.Callback.active if callbacks is None else callbacks)
    return rd.get(dsk, keys, **options, callbacks=[*callbacks, (None, None, None, evict, None)])


SCHEDULERS = {"threads": dask.threaded.get, "recompute": rd.get, "evicted": get_evicted}


def pytest_configure() -> None:
    get = SCHEDULERS[os.environ["DASK_SCHEDULER"]]
    for name in NAMES:
        if isinstance(name, str):
            dask.base.named_schedulers[name] = get
    dask.config.set(scheduler=get)
