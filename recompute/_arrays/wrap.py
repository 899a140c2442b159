"""Wrapping: an array, or all arrays in nested tuples, lists and dicts, as recomputable ones."""

from __future__ import annotations

from copy import copy
from typing import Any, overload

from recompute._adapters.adapter import kinds
from recompute._arrays.array import RecomputableArray, again
from recompute._arrays.call import rebuilt
from recompute._arrays.operate import adapter_of
from recompute._context import current_cache
from recompute._recomputable import Recomputable


@overload
def array(x: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> Any: ...
@overload
def array(x: Any) -> RecomputableArray: ...
def array(x: Any) -> Any:
    """An array as a source of the current cache, on which array code runs unchanged; or all arrays in a nest.

    `x`: an array of NumPy, CuPy, JAX or another library with an array adapter; a Recomputable that holds one, of which
    this makes another reference; or tuples, named ones too, lists and dicts with arrays in them: the same nest with
    these wrapped, while everything else stays. Not copied and not frozen: do not change an array any more. Raises
    TypeError for what is no array, and has none in it, or an array of Python objects; BudgetError if it does not fit.
    Cost: a few microseconds an array.
    """
    if isinstance(x, Recomputable):
        if not isinstance(x, RecomputableArray) and adapter_of(x._node) is None and not kinds[type(x.get())].array:
            raise TypeError(f"rc.array takes an array, or a Recomputable of one, not {x!r}")
        return again(x)
    if isinstance(x, (tuple, list, dict)):
        arrays: list[RecomputableArray] = []
        nest = wrapped(x, arrays)
        if arrays:
            return nest
    adapter = kinds[type(x)].array
    if adapter is None:
        raise TypeError(
            f"rc.array wraps an array that a library has made, not a {type(x).__name__}; make one first, for example "
            "rc.array(numpy.asarray(x)), or use rc.pure for other objects"
        )
    adapter.check(x)
    return current_cache().extend.source(adapter.source(x), RecomputableArray)


def wrapped(tree: Any, arrays: list[RecomputableArray]) -> Any:
    """A nest with its arrays wrapped; these are added to `arrays`. NumPy's scalars are numbers here, and stay."""
    if isinstance(tree, RecomputableArray):
        arrays.append(tree)
    if isinstance(tree, Recomputable):
        return tree
    if isinstance(tree, tuple):
        return rebuilt(tree, [wrapped(branch, arrays) for branch in tree])
    if type(tree) is list:
        return [wrapped(branch, arrays) for branch in tree]
    if isinstance(tree, dict):
        same = copy(tree)  # a defaultdict has more than its items
        same.update((key, wrapped(branch, arrays)) for key, branch in tree.items())
        return same
    adapter = kinds[type(tree)].array
    if adapter is None or adapter.constant(tree):
        return tree
    arrays.append(array(tree))
    return arrays[-1]
