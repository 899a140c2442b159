"""The engine's interface for authors of adapters, three protocols; besides it, they need only the surface.

    cache.extend: Extension    of one cache: `Values` runs operations, and makes, holds and changes values; `Watch`
                               knows what happens, what is in memory and what it took, and advises what to keep
    Settings                   what is set when a cache is made: `Cache(..., settings=Settings(smallest=1000))`

The rest is types, for annotations and comparisons, and

    running, clock_of, spend_elsewhere    the operation whose function runs here, and the time that counts as its cost
    identity, constant, Outputs           what a function says about itself: see `Values.run`
    bound                                 a function with what its names are bound to now
    pack, Container, Changeable           nested arguments, with nodes in place of handles, and plain ones as they were
    handle_like, common_engine            of arguments: the class of handles of results; are they of one cache?
    is_array, outlive                     what adapters say of a value
    node_of                               the value that a Recomputable refers to
    outline_of, forget_outline            what an adapter wanted to know of an evicted value
    is_interrupt                          whether an error is from the handler of a signal: let it pass
    leave_in_steps                        `__exit__` of a block that no interrupt leaves half open
    RLock                                 threading's, that no such error leaves acquired in Python 3.14 either
    Generators                            how the states of generators of random numbers are saved and set again
    Tier, Store, Link                     a tier of your own for evicted values
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recompute._adapters.adapter import kinds
from recompute._adapters.generators import Generators
from recompute._background import BackgroundThread
from recompute._context import InSteps, leave_in_steps
from recompute._engine import requests
from recompute._engine.advice import Advice
from recompute._engine.arguments import Changeable, Container, Outputs, bound, pack
from recompute._engine.extension import Counts, Extension, Handle, Load, Values, Watch
from recompute._engine.frames import Frame, HandleOf
from recompute._engine.frames import running as _running
from recompute._engine.graph import EVICTED, Held, Operation, Storage, Value
from recompute._engine.options import Settings
from recompute._engine.pool import Pool
from recompute._engine.sizes import constant, identity
from recompute._engine.stats import TIER_COLUMNS, PoolStats, Recomputed
from recompute._handle import common_engine
from recompute._interrupts import is_interrupt
from recompute._locks import RLock
from recompute._recomputable import handle_like
from recompute._tiers.link import Link
from recompute._tiers.tier import Store, Tier


def running() -> Frame | None:
    """The operation whose function runs here, the innermost: `engine` is that of its cache."""
    return _running.frame()


def clock_of(frame: Frame) -> Callable[[], float]:
    """The clock that times `frame`, in seconds. Time that is added to `frame.elsewhere` does not count as its cost."""
    return frame.engine.meter.clock


def spend_elsewhere(seconds: float) -> None:
    """Leave seconds out of the cost of the function that runs here, if any: those of a compilation, for example."""
    frame = running()
    if frame is not None:
        frame.elsewhere += seconds


def node_of(handle: Handle) -> Value:
    """The value that a Recomputable refers to."""
    return handle._node


def outline_of(node: Value) -> Any:
    """What its adapter keeps of an evicted value; None if it is not evicted, or nothing was kept.

    The outline of an array is kept if `rc.array` has wrapped it.
    """
    return None if node.remains is None else node.remains.outline


def forget_outline(node: Value) -> None:
    """Do not call `Adapter.restored` when an evicted value comes back: what `evicted` returned is no longer valid."""
    requests.forget_outline(node)


def is_array(value: Any) -> bool:
    """Whether an adapter for arrays serves the value."""
    return kinds[type(value)].array is not None


def outlive(value: Value) -> bool:
    """Keep the memory of a value when nothing refers to it any more; False if it is not there, or cannot stay."""
    payload = value.payload
    if payload is EVICTED:
        return False
    kind = kinds[type(payload)]
    return kind.outlive is None or kind.outlive(payload)


__all__ = [
    "EVICTED",
    "TIER_COLUMNS",
    "Advice",
    "BackgroundThread",
    "Changeable",
    "Container",
    "Counts",
    "Extension",
    "Frame",
    "Generators",
    "HandleOf",
    "Held",
    "InSteps",
    "Link",
    "Load",
    "Operation",
    "Outputs",
    "Pool",
    "PoolStats",
    "RLock",
    "Recomputed",
    "Settings",
    "Storage",
    "Store",
    "Tier",
    "Value",
    "Values",
    "Watch",
    "bound",
    "clock_of",
    "common_engine",
    "constant",
    "forget_outline",
    "handle_like",
    "identity",
    "is_array",
    "is_interrupt",
    "leave_in_steps",
    "node_of",
    "outline_of",
    "outlive",
    "pack",
    "running",
    "spend_elsewhere",
]
