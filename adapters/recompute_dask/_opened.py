"""Graphs, opened, and what they need at least: what is put together from parts takes them one at a time.

Dask's tasks take all that they need at once. Mostly that is little, but not where blocks are joined: for a rechunk, for
the margins of `map_overlap`, and where the result of a computation is put together. And where `getitem` cuts something
out of a block, what is cut out is a view, which keeps the whole block. So, of a graph whose blocks have known shapes:

* a task that only joins blocks becomes a `Join`: which part of which block goes where;
* parts that are cut out are no results of their own any more: the join cuts them out of the blocks itself;
* a join whose parts are from other joins takes them from the blocks of these, where those would be too large; and so
  does what is cut out of a join, which becomes a join itself.

Tasks that were fused with a join are tasks again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from math import prod
from typing import Any, Final, NamedTuple

from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.base import collections_to_expr, unpack_collections
from dask.core import flatten, toposort

from recompute_dask._metadata import (
    Block,
    Metadata,
    cut_of,
    graph_of,
    grid_of,
    is_fused,
    is_join,
    made_as,
    origin,
    referred,
)

_MAX_PARTS: Final = 4096
"""Parts of a join that takes the parts of other joins: more would take longer to find and to copy than it is worth."""
_MAX_PARTS_OF_ALL: Final = 200_000
"""Parts of all joins of a graph."""

Span = tuple[range, ...]
"""Elements of an array, by axis."""


class Part(NamedTuple):
    """What is cut out of a block, and where it goes."""

    source: Hashable
    cut: Span
    place: Span


class Join(NamedTuple):
    """An array that is put together, in memory for an array of the shape `memory`, whose first elements it is."""

    block: Block
    memory: tuple[int, ...]
    parts: tuple[Part, ...]
    sources: Mapping[Hashable, Block]

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return Block(self.memory, self.block.dtype).nbytes

    @property
    def least(self) -> int:
        """Bytes: of the result, and of the largest block that something is cut out of."""
        return self.nbytes + max(source.nbytes for source in self.sources.values())

    @property
    def most(self) -> int:
        """Bytes, if it takes all blocks at once."""
        return self.nbytes + sum(source.nbytes for source in self.sources.values())


class Opened(NamedTuple):
    """A graph, and the joins of it by key: their tasks do the same with all blocks at once."""

    graph: dict[Any, GraphNode]
    joins: dict[Hashable, Join]


def opened(graph: Mapping[Any, GraphNode], keys: set[Any], metadata: Metadata, room: float) -> Opened:
    """A graph in which what takes more than `room` bytes at once is opened, as far as shapes are known.

    O(tasks and parts).
    """
    return _Opening(graph, metadata, room).opened(keys)


class _Opening:
    def __init__(self, graph: Mapping[Any, GraphNode], metadata: Metadata, room: float) -> None:
        self._graph = unfused(graph)
        self._metadata = metadata
        self._room = room
        self._joins: dict[Hashable, Join] = {}
        self._absorbed: dict[Hashable, dict[Hashable, None]] = {}
        """By the key of a join, those of the tasks that it does itself."""

    def opened(self, keys: set[Any]) -> Opened:
        for key, task in self._graph.items():
            grid = grid_of(task)
            if grid is not None:
                self._read(key, grid)
        if not self._joins:
            return Opened(_needed(self._graph, keys), {})
        cuts = dict(self._cuts_of_joins())
        chosen: dict[Hashable, Join] = {}
        left = _MAX_PARTS_OF_ALL
        for key in toposort(self._graph):
            join = self._joins.get(key) or cuts.get(key)
            if join is None:
                continue
            through = self._through_others(key, join, left)
            left -= len(through.parts)
            if key in self._joins:
                self._joins[key] = through
            if through is not join if key in cuts else through.most > self._room:
                chosen[key] = through
        graph = dict(self._graph)
        for key in chosen:
            absorbed = [self._graph[part] for part in self._absorbed[key]]
            graph[key] = _fused([*absorbed, self._graph[key]], key)
        graph = _needed(graph, keys)
        return Opened(graph, {key: join for key, join in chosen.items() if key in graph})

    def _cuts_of_joins(self) -> Iterator[tuple[Hashable, Join]]:
        """What is only cut out of a join, as if it were one.

        What is cut out of an array may not be contiguous, and functions may add its elements up in another order than
        those of an array that is. So memory has one element more along each axis that is cut, but the first.
        """
        for key, task in self._graph.items():
            if cut_of(task) is not None:
                absorbed: dict[Hashable, None] = {}
                cut_out = self._cut(task, absorbed)
                if cut_out is None or cut_out[0] not in self._joins:
                    continue
                source, cut, block = cut_out
                shape = tuple(map(len, cut))
                if prod(shape) and all(span.step == 1 for span in cut):
                    partial = [axis > 0 and len(span) < block.shape[axis] for axis, span in enumerate(cut)]
                    memory = tuple(length + more for length, more in zip(shape, partial, strict=True))
                    part = Part(source, cut, tuple(map(range, shape)))
                    yield key, Join(Block(shape, block.dtype), memory, (part,), {source: block})
                    self._absorbed[key] = absorbed

    def _read(self, key: Hashable, grid: dict[tuple[int, ...], Any]) -> None:
        """Note how a task joins blocks, if they are known, and make up a grid."""
        absorbed: dict[Hashable, None] = {}
        cuts_or_none = {index: self._cut(leaf, absorbed) for index, leaf in grid.items()}
        cuts: dict[tuple[int, ...], tuple[Hashable, Span, Block]] = {
            index: cut for index, cut in cuts_or_none.items() if cut is not None
        }
        if len(cuts) < len(grid):
            return
        numbers = [max(along) + 1 for along in zip(*cuts, strict=True)]
        origin = cuts[(0,) * len(numbers)]
        dtype = origin[2].dtype
        widths: list[list[int]] = []
        for axis, count in enumerate(numbers):
            along = [tuple(number if axis == other else 0 for other in range(len(numbers))) for number in range(count)]
            widths.append([len(cuts[index][1][axis]) if len(cuts[index][1]) == len(numbers) else 0 for index in along])
        parts, sources = [], {}
        for index, (source, cut, block) in cuts.items():
            if [len(span) for span in cut] != [widths[axis][number] for axis, number in enumerate(index)]:
                return
            if block.dtype != dtype:
                return
            starts = [sum(widths[axis][:number]) for axis, number in enumerate(index)]
            place = tuple(range(start, start + len(span)) for start, span in zip(starts, cut, strict=True))
            parts.append(Part(source, cut, place))
            sources[source] = block
        whole = Block(tuple(map(sum, widths)), dtype)
        if prod(whole.shape):
            self._joins[key] = Join(whole, whole.shape, tuple(parts), sources)
            self._absorbed[key] = absorbed

    def _cut(self, leaf: Any, absorbed: dict[Hashable, None]) -> tuple[Hashable, Span, Block] | None:
        """The block that an argument is cut out of, how, and the block's shape; None: not known."""
        cuts: list[tuple[slice, ...]] = []
        while True:
            if isinstance(leaf, (Alias, TaskRef)):
                key = referred(leaf)
                task = self._graph.get(key)
                if isinstance(task, Alias) or cut_of(task) is not None:
                    absorbed[key] = None
                    leaf = TaskRef(task.target) if isinstance(task, Alias) else task
                    continue
                block = self._metadata.block(key)
                if block is None and task is not None:
                    block = self._metadata.block(made_as(task))
                return None if block is None else _applied(key, block, cuts)
            cut = cut_of(leaf)
            if cut is None:
                return None
            leaf, slices = cut
            cuts.append(slices)

    def _through_others(self, key: Hashable, join: Join, left: int) -> Join:
        """A join that takes its parts from the blocks of other joins, where those take more than there is room."""
        parts: list[Part] = []
        sources: dict[Hashable, Block] = {}
        absorbed: dict[Hashable, None] = {}
        for part in join.parts:
            other = self._joins.get(part.source)
            if other is None or other.least <= self._room or any(span.step != 1 for span in part.cut):
                parts.append(part)
                sources[part.source] = join.sources[part.source]
                continue
            absorbed |= {part.source: None, **self._absorbed[part.source]}
            for inner in other.parts:
                crossed = _crossed(part, inner)
                if crossed is not None:
                    parts.append(crossed)
                    sources[inner.source] = other.sources[inner.source]
            if len(parts) > min(_MAX_PARTS, left):
                return join
        if absorbed and not absorbed.keys() & sources.keys():  # else some of its parts do not go through
            self._absorbed[key] |= absorbed
            return Join(join.block, join.memory, tuple(parts), sources)
        return join


def unfused(graph: Mapping[Any, GraphNode]) -> dict[Any, GraphNode]:
    """A graph in which tasks that were fused with a join, cut something out of one, or only cut, are tasks again."""
    result = dict(graph)
    fused = list(filter(is_fused, graph.values()))
    rest = []
    for task in fused:
        tasks = task.args[0].values()
        if any(map(is_join, tasks)) or all(isinstance(part, Alias) or cut_of(part) for part in tasks):
            _unfuse(result, task)
        else:
            rest.append(task)
    joins = {key for key, task in result.items() if is_join(task)}
    for task in rest:
        if any(_is_cut_of_one(part, joins, result) for part in task.args[0].values()):
            _unfuse(result, task)
    return result


def _is_cut_of_one(task: GraphNode, keys: set[Any], graph: Mapping[Any, GraphNode]) -> bool:
    """Whether a task cuts something out of the result of one of these."""
    cut = cut_of(task)
    while cut is not None and isinstance(cut[0], (Alias, TaskRef)):
        key = referred(cut[0])
        other = graph.get(key)
        if key in keys:
            return True
        cut = (other, ()) if isinstance(other, Alias) else cut_of(other)
    return False


def _unfuse(graph: dict[Any, GraphNode], task: Task) -> None:
    """Have the tasks that were fused, unless the graph has others with the same keys."""
    key, inner, last = task.key, task.args[0], task.args[1]
    own = {part.key for part in inner.values()}
    renamed = graph.get(last)
    is_renamed = last == key or renamed is None or (isinstance(renamed, Alias) and renamed.target == key)
    if own == set(inner) and is_renamed and not any(other in graph for other in own - {key, last}):
        graph.update(inner)
        if last != key:
            graph[key] = Alias(key, last)


def _fused(tasks: list[GraphNode], key: Any) -> GraphNode:
    return Task.fuse(*tasks, key=key) if len(tasks) > 1 else tasks[0]


def _applied(key: Hashable, block: Block, cuts: list[tuple[slice, ...]]) -> tuple[Hashable, Span, Block] | None:
    """What slices of slices, the last one first, leave of a block."""
    span = tuple(map(range, block.shape))
    for slices in reversed(cuts):
        if len(slices) > len(span):
            return None
        full = (*slices, *[slice(None)] * (len(span) - len(slices)))
        span = tuple(along[cut] for along, cut in zip(span, full, strict=True))
    return key, span, block


def _crossed(part: Part, inner: Part) -> Part | None:
    """What a part of a join takes of a part of another one, which it is cut out of; None: nothing."""
    cut, place = [], []
    for outer, there, source, target in zip(part.cut, inner.place, inner.cut, part.place, strict=True):
        first, last = max(outer.start, there.start), min(outer.stop, there.stop)
        if first >= last:
            return None
        cut.append(source[first - there.start : last - there.start])
        place.append(target[first - outer.start : last - outer.start])
    return Part(inner.source, tuple(cut), tuple(place))


def _needed(graph: dict[Any, GraphNode], keys: set[Any]) -> dict[Any, GraphNode]:
    """The tasks that keys need."""
    needed: dict[Any, GraphNode] = {}
    stack = [key for key in keys if key in graph]
    while stack:
        key = stack.pop()
        if key not in needed:
            needed[key] = graph[key]
            stack += [dependency for dependency in graph[key].dependencies if dependency in graph]
    return needed


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
        A collection, containers of several as `dask.compute` takes them, or a graph as `dask.threaded.get` takes it.

    Nothing runs: sizes are those of the metadata (chunks and dtype of arrays). Data in the graph itself is not counted.
    O(tasks). Raises TypeError for anything else.
    """
    collections, _ = unpack_collections(graph)
    if collections:
        from dask._expr import FinalizeCompute

        graph = FinalizeCompute(collections_to_expr(collections)).optimize()
        keys = set(flatten(graph.__dask_keys__()))
    elif isinstance(graph, Mapping):
        keys = None
    else:
        raise TypeError(f"least takes a collection of Dask's, several in a container, or a graph, not {graph!r:.60}")
    metadata, tasks = Metadata(graph), graph_of(graph)
    tasks, joins = opened(tasks, set(tasks) if keys is None else keys, metadata, 0)
    sizes = metadata.results(tasks).sizes
    most, most_key, unknown = 0, None, 0
    for key, task in tasks.items():
        if isinstance(task, (Alias, DataNode)):
            continue
        unknown += key not in sizes and key not in joins
        if key in joins:
            needed = joins[key].least
        else:
            taken = {origin(dependency, tasks) for dependency in task.dependencies}
            needed = sum(sizes.get(argument, 0) for argument in taken) + sizes.get(key, 0)
        if needed > most or most_key is None:
            most, most_key = needed, key
    return Least(most, most_key, unknown)
