"""Random graphs of Dask's, and what they are worth: each task on copies of its own."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from typing import Any

import numpy as np
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from hypothesis import strategies as st

LENGTH = 100
ARRAY = 8 * LENGTH  # bytes
_graphs = count()  # so that each has keys of its own: a cluster knows those of the one before, for a while
KINDS = "make add write reverse same pair list alias embedded lazily grow literal fused".split()


def make(seed: int) -> Any:
    return np.arange(seed, seed + LENGTH, dtype=float)


def add(*arrays: Any) -> Any:
    return sum(arrays, np.zeros(LENGTH))


def add_in_place(*arrays: Any) -> Any:
    arrays[0][1:] += arrays[-1][:-1]
    return arrays[0]


def reverse(array: Any) -> Any:
    return array[::-1]


def same(array: Any, *others: Any) -> Any:
    return array


def pair(one: Any, other: Any) -> Any:
    return one + 1, [other - 1]


def take(two: Any) -> Any:
    two[1].append(two[0])  # in place
    return two[1][0] + len(two[1])


class Thing:
    """A type that nobody knows, with parts that tasks change."""

    def __init__(self, array: Any) -> None:
        self.parts = {"array": array + 1, "more": [array]}


def thing(array: Any) -> Thing:
    return Thing(array)


def grow(one: Thing, two: tuple[Any, list[Any]], literal: list[Any]) -> Any:
    """Changes what it takes in all ways there are."""
    one.parts["array"] += 1
    one.parts["more"].append(one.parts["array"])
    two[0][:] *= 2
    two[1].append(two[0])
    literal.append(two[0])
    return sum(one.parts["more"]) + sum(two[1]) + sum(literal)


def lazily(array: Any) -> Any:
    return (number + 1 for number in array)


def read(numbers: Any) -> Any:
    return np.fromiter(numbers, float)


def add_all(arrays: list[Any]) -> Any:
    arrays.sort(key=lambda array: array[0])
    return np.sum(arrays, axis=0)


@st.composite
def graphs(draw: st.DrawFn, kinds: list[str] = KINDS) -> tuple[dict[Any, Any], list[Any]]:
    """A graph, and the keys to compute, some of them nested."""
    own = next(_graphs)
    graph: dict[Any, Any] = {f"data-{own}": DataNode(f"data-{own}", make(7)), f"x-{own}": Task(f"x-{own}", make, 3)}
    arrays: list[Any] = list(graph)
    for number in range(draw(st.integers(1, 12))):
        key = (f"y-{own}", number)
        what = draw(st.sampled_from(kinds))
        taken = [TaskRef(array) for array in draw(st.lists(st.sampled_from(arrays), min_size=1, max_size=3))]
        if what == "make":
            graph[key] = Task(key, make, number)
        elif what == "add":
            graph[key] = Task(key, add, *taken)
        elif what == "write":
            graph[key] = Task(key, add_in_place, *taken)
        elif what in ("reverse", "same"):
            graph[key] = Task(key, reverse if what == "reverse" else same, taken[0])
        elif what == "alias":
            graph[key] = Alias(key, taken[0].key)
        elif what == "list":
            graph[key] = Task(key, add_all, List(*taken))
        elif what == "embedded":
            graph[key] = Task(key, draw(st.sampled_from([same, add_in_place])), make(number), taken[0])
        elif what == "pair":
            graph[f"pair-{own}", number] = Task((f"pair-{own}", number), pair, taken[0], taken[-1])
            graph[key] = Task(key, take, TaskRef((f"pair-{own}", number)))
        elif what in ("grow", "literal", "fused"):
            changed = draw(st.sampled_from(arrays))
            graph.setdefault(f"thing-{changed}", Task(f"thing-{changed}", thing, TaskRef(changed)))
            graph.setdefault(f"two-{changed}", Task(f"two-{changed}", pair, TaskRef(changed), TaskRef(changed)))
            things = TaskRef(f"thing-{changed}"), TaskRef(f"two-{changed}")
            literal = [make(number)] if what == "literal" else []
            graph[key] = Task(key, grow, *things, literal)
            if what == "fused":
                inner = Task((f"inner-{own}", number), add_in_place, make(number), taken[0])
                graph[key] = Task.fuse(inner, Task(key, add_in_place, TaskRef(inner.key), taken[-1]), key=key)
        elif what == "lazily":
            graph[f"lazy-{own}", number] = Task((f"lazy-{own}", number), lazily, taken[0])
            graph[key] = Task(key, read, TaskRef((f"lazy-{own}", number)))
        arrays.append(key)
    wanted: list[Any] = draw(st.lists(st.sampled_from(arrays), min_size=1, max_size=4))
    return graph, [wanted[0], wanted]


@st.composite
def array_programs(draw: st.DrawFn) -> Any:
    """Random numbers in blocks, which are rechunked, overlapped, cut, turned and added up."""
    import dask.array as da

    def chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([draw(st.integers(max(1, length // 4), length)) for length in shape])

    shape = draw(st.tuples(st.integers(4, 40), st.integers(4, 40)))
    numbers: Any = da.random.default_rng(draw(st.integers(0, 3)))  # type: ignore[no-untyped-call]  # Dask's
    x = numbers.random(shape, chunks=chunks(shape))
    for _ in range(draw(st.integers(1, 4))):
        what = draw(st.sampled_from("rechunk rechunk rechunk overlap cut turn add cumsum centre".split()))
        axis = draw(st.integers(0, 1))
        if what == "rechunk":
            x = x.rechunk(chunks(x.shape))
        elif what == "overlap":
            boundary = draw(st.sampled_from(["reflect", "periodic", "none", 0.0]))
            depth = min(1, *map(min, x.chunks))
            map_overlap: Any = da.map_overlap
            x = map_overlap(_summed, x, depth=depth, boundary=boundary, dtype=float, meta=np.empty((0, 0)))
        elif what == "cut":
            cut = slice(draw(st.integers(0, 2)), None, draw(st.sampled_from([1, 1, 2, -1])))
            if x.shape[axis] >= 4 and (cut.step > 0 or cut.start >= 0):
                x = x[(slice(None),) * axis + (slice(None, None, -1) if cut.step < 0 else cut,)]
        elif what == "turn":
            x = x.T
        elif what == "add":
            x = x + x.sum(axis=axis, keepdims=True)
        elif what == "cumsum":
            x = x.cumsum(axis=axis)
        else:
            x = x - x.mean(axis=axis, keepdims=True)
    end = draw(st.sampled_from(["all", 0, 1, None]))
    return x if end == "all" else x.sum(axis=end)


def _summed(array: Any) -> Any:
    return array + np.roll(array, 1, 0) * 0.1


def model(graph: dict[Any, Any], keys: Any, done: dict[Any, Any]) -> Any:
    """Each task on copies of its own."""
    if isinstance(keys, list):
        return tuple([model(graph, key, done) for key in keys])
    if keys not in done:
        task = deepcopy(graph[keys])  # it may hold an array that it writes into
        taken = {key: model(graph, key, done) for key in task.dependencies}
        done[keys] = list(result) if hasattr(result := task(deepcopy(taken)), "__next__") else result
    return done[keys]


def check_equal(wanted: Any, found: Any) -> None:
    assert type(wanted) is type(found)
    if isinstance(wanted, tuple):
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            check_equal(one, other)
    else:
        np.testing.assert_array_equal(wanted, found)
        assert found.flags.writeable


def misses_of_lru(numbers: list[int], room: int) -> int:
    """How often one is not there, if the one used longest ago makes room."""
    used: dict[int, None] = {}
    misses = 0
    for number in numbers:
        misses += number not in used
        used.pop(number, None)
        used[number] = None
        if len(used) > room:
            del used[next(iter(used))]
    return misses
