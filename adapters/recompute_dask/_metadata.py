"""Tasks, read before any of them runs: what they do, and what the metadata of collections say of their results.

Dask notes the chunks and the type of an array with the layer of its graph. Results of other collections, and of arrays
with unknown chunks, have no sizes before they are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, TypeGuard

from dask._task_spec import (
    Alias,
    GraphNode,
    NestedContainer,
    Task,
    TaskRef,
    _execute_subgraph,
    _identity_cast,
    convert_legacy_graph,
)
from dask.highlevelgraph import HighLevelGraph, Layer

_PLAIN: Final = "numpy.ndarray"
_JOINS: Final = {
    ("dask.array.core", "concatenate_shaped"),
    ("dask.array.core", "concatenate3"),
    ("dask.array.core", "finalize"),
}
GETITEMS: Final = frozenset({"getitem"})
"""Names of the functions that index an array, of `operator` and of Dask."""


class Block(NamedTuple):
    """One chunk of an array of NumPy's."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * int(self.dtype.itemsize)


class Results(NamedTuple):
    """What tasks return, by key."""

    sizes: dict[Hashable, int]
    """Bytes."""
    arrays: dict[Hashable, int]
    """How many arrays, of tasks from whose results others only take single items out."""


class Metadata:
    """Blocks by key, of the layers of a graph."""

    def __init__(self, graph: Any) -> None:
        self._layers: dict[str, tuple[tuple[tuple[Any, ...], ...], Any]] = {}
        for name, layer in _layers(graph):
            noted = layer.collection_annotations or {}
            dtype = noted.get("dtype")
            is_known = noted.get("chunk_type") == _PLAIN and noted.get("chunks") is not None
            if is_known and dtype is not None and not dtype.hasobject:
                self._layers[name] = noted["chunks"], dtype

    def block(self, key: Hashable) -> Block | None:
        """What will be there under this key, if that is known."""
        if not isinstance(key, tuple) or not key or key[0] not in self._layers:
            return None
        chunks, dtype = self._layers[key[0]]
        if len(key) != len(chunks) + 1:
            return None
        shape = []
        for number, widths in zip(key[1:], chunks, strict=True):
            if type(number) is not int or not 0 <= number < len(widths) or type(widths[number]) is not int:
                return None
            shape.append(widths[number])
        return Block(tuple(shape), dtype)

    def results(self, graph: Mapping[Any, GraphNode]) -> Results:
        """What tasks return, as far as that is known.

        A task that returns several arrays, each of which another task takes out, has the bytes of these together.
        """
        sizes: dict[Hashable, int] = {}
        for key, task in graph.items():
            block = None if isinstance(task, Alias) or _begins_reduction(task) else self.block(made_as(task))
            if block is not None:
                sizes[key] = block.nbytes
        users_by_key = _users_of_items(graph)
        for key, users in users_by_key.items():
            if key not in sizes and all(user in sizes for user in users.values()):
                sizes[key] = sum([sizes[user] for user in users.values()])
        return Results(sizes, {key: len(users) for key, users in users_by_key.items()})


def _users_of_items(graph: Mapping[Any, GraphNode]) -> dict[Hashable, dict[int, Hashable]]:
    """By item, which task takes it out and returns it; None: it does more with it."""
    takers: dict[Hashable, dict[int, Hashable]] = {}
    others = set()
    for user, task in graph.items():
        parts = task.args[0].values() if is_fused(task) else (task,)
        for part in parts:
            for key in part.dependencies:
                item = _item_of(part, key)
                if item is not None:
                    takers.setdefault(origin(key, graph), {})[item] = user if part is task else None
                elif not isinstance(task, Alias):
                    others.add(origin(key, graph))
    return {key: users for key, users in takers.items() if key not in others}


def origin(key: Hashable, graph: Mapping[Any, GraphNode]) -> Hashable:
    """The key of the task whose result is there under a key."""
    task = graph.get(key)
    while isinstance(task, Alias) and task.target in graph:
        key = task.target
        task = graph[key]
    return key


def is_fused(task: Any) -> TypeGuard[Task]:
    """Whether a task runs several that were fused: `args` are these by key, and the key of the last one."""
    return isinstance(task, Task) and task.func is _execute_subgraph


def made_as(task: GraphNode) -> Hashable:
    """The key of a task, or of the last one of several that were fused."""
    last: Hashable = task.args[1] if is_fused(task) else task.key
    return last


def _begins_reduction(task: GraphNode) -> bool:
    """Whether a task reduces one block, whose shape Dask notes as it was before; it may return several arrays, too."""
    while is_fused(task):
        task = task.args[0][task.args[1]]
    return isinstance(task, Task) and bool(task.kwargs.get("keepdims"))


def _item_of(task: GraphNode, key: Hashable) -> int | None:
    """Which item of a result a task takes out and returns, if that is all that it does."""
    if isinstance(task, Task) and getattr(task.func, "__name__", "") in GETITEMS and len(task.args) == 2:
        whole, item = task.args
        if isinstance(whole, (Alias, TaskRef)) and referred(whole) == key and type(item) is int:
            return item
    return None


def referred(reference: Alias | TaskRef) -> Hashable:
    """The key of what an argument of a task refers to."""
    return reference.target if isinstance(reference, Alias) else reference.key


def graph_of(dsk: Any) -> dict[Any, GraphNode]:
    """The tasks of an expression, of layers, or of a graph, by key."""
    return dict(convert_legacy_graph(dsk if isinstance(dsk, Mapping) else dsk.__dask_graph__()))


def _layers(graph: Any) -> Iterator[tuple[str, Layer]]:
    if isinstance(graph, HighLevelGraph):
        yield from graph.layers.items()
    elif hasattr(graph, "walk"):  # an expression
        for part in graph.walk():
            for operand in part.operands:
                if isinstance(operand, HighLevelGraph):
                    yield from operand.layers.items()


def is_join(task: Any) -> TypeGuard[Task]:
    if not isinstance(task, Task):
        return False
    return (getattr(task.func, "__module__", ""), getattr(task.func, "__name__", "")) in _JOINS


def grid_of(task: GraphNode) -> dict[tuple[int, ...], Any] | None:
    """What a task joins, by its place among the others; None: it does something else."""
    if not is_join(task) or task.kwargs:
        return None
    nested = _nested(task.args[0])
    if not isinstance(nested, list):
        return None
    if task.func.__name__ == "concatenate_shaped":
        shape = list(task.args[1])
        if len(nested) != prod(shape) or any(isinstance(part, list) for part in nested):
            return None
        return dict(zip(product(*map(range, shape)), nested, strict=True))
    grid: dict[tuple[int, ...], Any] = {(): nested}
    while any(isinstance(part, list) for part in grid.values()):
        if not all(isinstance(part, list) for part in grid.values()):
            return None
        grid = {(*index, number): part for index, row in grid.items() for number, part in enumerate(row)}
    numbers = [max(along) + 1 for along in zip(*grid, strict=True)]
    return grid if len(grid) == prod(numbers) else None


def _nested(argument: Any) -> Any:
    """Lists of a task's argument as lists; other parts as they are."""
    is_list = isinstance(argument, NestedContainer) and argument.klass in (list, tuple)
    if is_list or (isinstance(argument, Task) and argument.func is _identity_cast and argument.kwargs["typ"] is list):
        return [_nested(part) for part in argument.args]
    return argument


def cut_of(task: Any) -> tuple[Any, tuple[slice, ...]] | None:
    """What a task cuts something out of, and the slices; None: it does something else."""
    if not isinstance(task, Task) or getattr(task.func, "__name__", "") not in GETITEMS or len(task.args) != 2:
        return None
    whole, index = task.args
    if isinstance(index, slice):
        index = (index,)
    if type(index) is not tuple or not all(type(part) is slice for part in index) or task.kwargs:
        return None
    return (whole, index) if isinstance(whole, (Alias, TaskRef, Task)) else None
