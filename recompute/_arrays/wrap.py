"""Wrapping: an array, or all arrays in a nest, as recomputable ones."""

from __future__ import annotations

from copy import copy
from typing import Any

from recompute._adapters.adapter import kinds
from recompute._arrays.array import RecomputableArray, again
from recompute._arrays.call import rebuilt
from recompute._arrays.operate import adapter_of
from recompute._context import current_cache
from recompute._recomputable import Recomputable


def array(x: Any) -> RecomputableArray:
    """An array as a source of the current cache, on which array code runs unchanged.

    `x`: an array of NumPy, CuPy, JAX or another library with an array adapter; or a Recomputable that holds one, of
    which this makes another reference. Not copied and not frozen: do not change it any more. Raises TypeError for
    what is no array, or an array of Python objects; BudgetError if it does not fit. Cost: a few microseconds.
    """
    if isinstance(x, Recomputable):
        if not isinstance(x, RecomputableArray) and adapter_of(x._node) is None and not kinds[type(x.get())].array:
            raise TypeError(f"rc.array takes an array, or a Recomputable of one, not {x!r}")
        return again(x)
    adapter = kinds[type(x)].array
    if adapter is None:
        raise TypeError(
            f"rc.array wraps an array that a library has made, not a {type(x).__name__}; make one first, for example "
            "rc.array(numpy.asarray(x)), or use rc.pure for other objects"
        )
    adapter.check(x)
    return current_cache().extend.source(adapter.source(x), RecomputableArray)


def asarray(x: Any) -> RecomputableArray:
    """`array`, but a RecomputableArray is returned as it is."""
    return x if isinstance(x, RecomputableArray) else array(x)


def wrap(tree: Any) -> Any:
    """Each array in nested tuples, lists and dicts wrapped by `asarray`; everything else stays.

    Named tuples stay named. NumPy's scalars are numbers here and stay too.
    """
    if isinstance(tree, Recomputable):
        return tree
    if isinstance(tree, tuple):
        return rebuilt(tree, [wrap(branch) for branch in tree])
    if type(tree) is list:
        return [wrap(branch) for branch in tree]
    if isinstance(tree, dict):
        same = copy(tree)  # a defaultdict has more than its items
        same.update((key, wrap(branch)) for key, branch in tree.items())
        return same
    adapter = kinds[type(tree)].array
    return tree if adapter is None or adapter.constant(tree) else array(tree)
