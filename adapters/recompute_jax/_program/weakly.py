"""What is found out of a jaxpr is known as long as that lives: the same one is in many plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from jax.extend.core import Jaxpr

R = TypeVar("R")


def weakly_cached(fn: Callable[[Jaxpr], R]) -> Callable[[Jaxpr], R]:
    """The function, which is called once for each jaxpr."""
    known: WeakKeyDictionary[Jaxpr, R] = WeakKeyDictionary()

    @wraps(fn)
    def found(jaxpr: Jaxpr) -> R:
        if jaxpr not in known:
            known[jaxpr] = fn(jaxpr)
        return known[jaxpr]

    return found
