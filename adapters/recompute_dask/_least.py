"""What a graph needs at least: the task that needs most at once, with what it takes and makes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from dask._task_spec import Alias, DataNode, GraphNode
from dask.base import collections_to_expr, is_dask_collection
from dask.core import flatten

from recompute_dask._metadata import Metadata, graph_of, origin
from recompute_dask._opened import Join, opened


class Least(NamedTuple):
    """Bytes that must be in memory at once.

    `task` is the key of the task that sets them; of `unknown` tasks the size of the result is not known before they
    run, and counts as nothing.
    """

    nbytes: int
    task: Hashable
    unknown: int


def least(graph: Any) -> Least:
    """The bytes that must be in memory at once while a graph runs within a budget, and the task that sets them.

    A task needs what it takes and its result. With less, `compute` raises BudgetError; with as much it may still do so,
    because what was evicted has to be computed again beside what the task holds already.

    Parameters
    ----------
    graph
        A collection, several of them in a tuple or list, or a graph as `dask.threaded.get` takes it.

    Nothing runs: sizes are those of the metadata (chunks and dtype of arrays). Data in the graph itself is not counted.
    O(tasks). Raises TypeError for anything else.
    """
    collections = graph if isinstance(graph, (tuple, list)) else [graph]
    if collections and all(map(is_dask_collection, collections)):
        from dask._expr import FinalizeCompute

        graph = FinalizeCompute(collections_to_expr(collections)).optimize()
        keys = set(flatten(graph.__dask_keys__()))
    elif isinstance(graph, Mapping):
        keys = None
    else:
        raise TypeError(f"least takes a collection of Dask's, several in a list, or a graph, not {graph!r:.60}")
    metadata, tasks = Metadata(graph), graph_of(graph)
    return least_of(*opened(tasks, set(tasks) if keys is None else keys, metadata, 0), metadata)


def least_of(graph: Mapping[Any, GraphNode], joins: Mapping[Hashable, Join], metadata: Metadata) -> Least:
    """The same of a graph that is opened."""
    sizes = metadata.results(graph).sizes
    most, most_key, unknown = 0, None, 0
    for key, task in graph.items():
        if isinstance(task, (Alias, DataNode)):
            continue
        unknown += key not in sizes and key not in joins
        if key in joins:
            needed = joins[key].least
        else:
            taken = {origin(dependency, graph) for dependency in task.dependencies}
            needed = sum(sizes.get(argument, 0) for argument in taken) + sizes.get(key, 0)
        if needed > most or most_key is None:
            most, most_key = needed, key
    return Least(most, most_key, unknown)
