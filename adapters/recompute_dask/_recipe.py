"""A task as a function of the values that it takes, which can run again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

from dask._task_spec import Alias, DataNode, GraphNode, TaskRef
from dask._task_spec import Task as SpecifiedTask
from dask.sizeof import sizeof
from dask.utils import key_split

import recompute as rc
from recompute import extend
from recompute_dask._payloads import (
    CONTAINERS,
    copied,
    given,
    is_fixed,
    is_plain,
    is_writable_array,
    leaving,
    own_structure,
    protected,
    refuses_writes,
    returned,
)

SMALL_BYTES: Final = 512
"""Bytes: to evict what is smaller would free nothing."""
_LARGE_BYTES: Final = 64_000
_DATA: Final = (list, tuple, dict, set, frozenset, str, bytes, bytearray)

_LIGHT: Final = (Alias, TaskRef, int, float, type(None), slice, type, FunctionType, BuiltinFunctionType)
"""Parts of tasks that take next to nothing."""

_TASK: Final = object()

_STORING: Final = frozenset({"store_chunk", "load_store_chunk"})

Place = Callable[[], AbstractContextManager[None]]
"""Where tasks run: what is around a call of one."""


class Held(rc.Recomputable[Any]):
    """A value of a task that may be evicted.

    Whether it could be written to when it was made; how many results, each made of the one before, lead to it; and
    whether it is one of a kind, of which tasks get no copy.
    """

    __slots__ = ("depth", "unique", "writable")
    depth: int
    unique: bool
    writable: bool


class Inlined:
    """A result that can be read only once, such as an iterator: whatever takes it makes it again, for itself."""

    def __init__(self, recipe: Recipe, held: list[Held]) -> None:
        self.recipe = recipe
        self.held = held


class Recipe:
    """A task as a function of the values of `held_of(data)`, in order; it does not keep these.

    Parameters
    ----------
    data
        What the task takes, by name: `Held`, `Inlined`, or a plain value, which is no matter of the cache.
    writers
        Names of the tasks that are known to write into their arguments: they run on copies.
    place
        Where it runs.
    stores
        Whether the task writes into an argument on purpose: it gets the values themselves, which can be written to.
    """

    def __init__(
        self, task: GraphNode, data: Mapping[Any, Any], writers: set[str], place: Place, *, stores: bool = False
    ) -> None:
        self.key: Hashable = task.key
        self.nbytes: int | None = None
        """Bytes of its result, if they are known before it runs."""
        self.guess: int | None = None
        """The same, if they are not known."""
        self.__name__ = key_split(task.key)
        self.returned = False
        """Whether the task has come to an end, at least once."""
        self.writable = False
        """Whether its result could be written to."""
        self.is_data = False
        """Whether its result is an array, a frame or a container."""
        self._task = task
        self._holds = not stores and any(holds(task))
        self._uniques = {name: value.unique for name, value in data.items() if isinstance(value, Held)}
        self._inlined: dict[Any, tuple[Recipe, int]] = {}
        self._plain: dict[Any, Any] = {}
        for name, value in data.items():
            if isinstance(value, Inlined):
                self._inlined[name] = value.recipe, len(value.held)
            elif not isinstance(value, Held):
                self._plain[name] = protected(value) if is_writable_array(value) and not stores else value
        self._writers = writers
        self._stores = stores
        self._place = place

    def size_key(self) -> Hashable:
        """Tasks of one layer make results of one size of arguments of one size, mostly."""
        layer = self.key[0] if isinstance(self.key, tuple) and self.key else self.__name__
        return Recipe, layer, self.nbytes, self.guess  # what is expected is filed, too: not where nothing is

    def expect(self, device: str) -> list[tuple[str, int]] | None:
        """Bytes of the result before the first run; None: not known."""
        nbytes = self.guess if self.nbytes is None else self.nbytes
        return None if nbytes is None else [(device, nbytes)]

    def __call__(self, *payloads: Any) -> Any:
        result, writable = returned(self.run(list(payloads)))
        self.writable = writable or bool(self._plain)
        self.is_data = is_data(result)
        self.returned = True
        return result

    def run(self, payloads: list[Any]) -> Any:
        """The result of the task. What writes into its arguments runs again, on copies, as do others of its name."""
        with self._place():
            if self.__name__ not in self._writers:
                try:
                    return self._own_task()(self._arguments(payloads))
                except (ValueError, TypeError, BufferError) as error:
                    if not refuses_writes(str(error)):
                        raise
                    self._writers.add(self.__name__)
            everything = copied({_TASK: self._own_task(), **self._arguments(payloads)})
            return everything.pop(_TASK)(everything)

    def _own_task(self) -> GraphNode:
        """The task; if it holds what it could change, with a structure of its own."""
        return own_task(self._task) if self._holds else self._task

    def _arguments(self, payloads: list[Any]) -> dict[Any, Any]:
        rest = iter(payloads)
        give = partial(leaving, writable=True) if self._stores else given
        arguments = {name: next(rest) if unique else give(next(rest)) for name, unique in self._uniques.items()}
        for name, (recipe, count) in self._inlined.items():
            arguments[name] = recipe.run([next(rest) for _ in range(count)])
        for name, value in self._plain.items():
            arguments[name] = given(value) if isinstance(value, CONTAINERS) else value
        return arguments


def held_of(data: Mapping[Any, Any]) -> list[Held]:
    """What a task takes from the cache: its arguments, and what those are made of that are made again each time."""
    held = [value for value in data.values() if isinstance(value, Held)]
    return held + [part for value in data.values() if isinstance(value, Inlined) for part in value.held]


def made(handle: Held, held: list[Held], *, writable: bool, unique: bool) -> Held:
    """What refers to a result that was made of `held`, and could be written to; so could a view of one that could be.

    It is read-only only because a cache has it.
    """
    handle.unique = unique
    handle.writable = writable or any(argument.writable for argument in held)
    handle.depth = 1 + max([argument.depth for argument in held], default=0)
    return handle


def is_kept(value: Any, nbytes: int) -> bool:
    """Whether a result stays, and its task never runs again.

    To evict what is small would free nothing, and a task with side effects mostly returns None.
    """
    return nbytes < SMALL_BYTES or _is_object(value, nbytes)


def is_unique(value: Any, nbytes: int) -> bool:
    """Whether a copy would not do: an object that is more than its attributes, such as a file that tasks append to."""
    return _is_object(value, nbytes) and not is_plain(value)


def _is_object(value: Any, nbytes: int) -> bool:
    """Whether it may have its state elsewhere: it is no container, array or frame, and not large."""
    return nbytes <= _LARGE_BYTES and not is_data(value)


def is_data(value: Any) -> bool:
    """Whether it is a container, an array or a frame."""
    return isinstance(value, _DATA) or hasattr(value, "shape")


def holds(spec: Any) -> tuple[bool, int]:
    """Whether a task itself holds arrays that it could write to; and how many containers that it could change.

    With what is in them.
    """
    arrays, containers = False, 0
    for part in _leaves(spec):
        if is_writable_array(part):
            arrays = True
        elif type(part) in CONTAINERS and not is_fixed(part):
            containers += 1 + len(part)
    return arrays, containers


def weight(spec: Any) -> int:
    """Bytes of what a task itself holds, which no other task makes."""
    return sum(sizeof(part) for part in _leaves(spec) if not isinstance(part, _LIGHT))


def _leaves(spec: Any) -> Iterator[Any]:
    """What a task calls, and its arguments as they are; of tasks that were fused, those of all."""
    stack = [spec]
    while stack:
        part = stack.pop()
        if isinstance(part, SpecifiedTask):
            stack += [part.func, *part.args, *part.kwargs.values()]
        elif isinstance(part, DataNode):
            stack.append(part.value)
        elif isinstance(part, partial):
            stack += [part.func, *part.args, *part.keywords.values()]
        elif type(part) is dict and any(isinstance(value, GraphNode) for value in part.values()):  # fused tasks
            stack += part.values()
        else:
            yield part


def own_task(task: GraphNode) -> GraphNode:
    """A task with a structure of its own, in which arrays are read-only; functions and other instances are shared."""
    try:
        return own_structure(task, (GraphNode, partial))  # type: ignore[no-any-return]  # as the task
    except Exception as error:  # of a user's `__reduce__`, or `__setstate__`
        if extend.is_interrupt(error):
            raise
        return task


def is_bound_to_worker(spec: Any) -> bool:
    """Whether a task is a coroutine, or uses a function of dask.distributed, such as a shuffle's: it runs once only."""
    return spec.is_coro or any(
        (getattr(part, "__module__", None) or "").startswith("distributed.") for part in uses(spec)
    )


def stores(spec: Any) -> bool:
    """Whether a task of Dask's own writes into an argument on purpose: `da.store` into an array of another task."""
    return any(getattr(part, "__name__", "") in _STORING for part in uses(spec))


def uses(spec: Any) -> Iterator[Any]:
    """What a task calls, and what it has as arguments, or in them; of tasks that were fused, all of them."""
    seen: dict[int, Any] = {}  # by identity, with the part: it must not die meanwhile
    stack = [spec]
    while stack:
        for part in _leaves(stack.pop()):
            if id(part) not in seen:
                seen[id(part)] = part
                if isinstance(part, dict):
                    stack += part.values()
                elif isinstance(part, (list, tuple)):
                    stack += part
                elif callable(part):
                    yield part
