"""A task as a function of the values that it takes, which can run again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from dask._task_spec import Task as SpecifiedTask
from dask._task_spec import TaskRef
from dask.utils import key_split

import recompute as rc
from recompute_dask._payloads import copied, given, is_writable_array, leaving, protected, refuses_writes, returned

_SMALL: Final = 512
_LARGE: Final = 64_000
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, str, bytes, bytearray)

_STORING: Final = frozenset({"store_chunk", "load_store_chunk"})

Task = Callable[[Mapping[Any, Any]], Any]
"""Of `dask._task_spec`: called with its arguments by key."""


class Held(rc.Recomputable[Any]):
    """A value of a task that may be evicted.

    Whether it could be written to when it was made, and how many results, each made of the one before, lead to it.
    """

    __slots__ = ("depth", "writable")
    depth: int
    writable: bool


class Inlined:
    """A result that can be read only once, such as an iterator: whatever takes it makes it again, for itself."""

    def __init__(self, recipe: Recipe, held: list[Held]) -> None:
        self.recipe = recipe
        self.held = held


class Recipe:
    """A task as a function of the values that it takes: those of `held`, in order.

    Parameters
    ----------
    key
        Of the task.
    names
        Of what it takes from the cache, in order.
    plain
        What else it takes, by name: no matter of the cache.
    inlined
        What it takes that is made again each time, by name; with how many values each of them takes itself.
    writers
        Names of the tasks that are known to write into their arguments: they run on copies.
    stores
        Whether the task writes into an argument on purpose: it gets the values themselves, which can be written to.
    """

    def __init__(
        self,
        key: Hashable,
        task: Task,
        names: list[Any],
        plain: dict[Any, Any],
        inlined: dict[Any, tuple[Recipe, int]],
        writers: set[str],
        stores: bool,
    ) -> None:
        self.key = key
        self.__name__ = key_split(key)
        self.returned = False
        """Whether the task has come to an end, at least once."""
        self.writable = False
        """Whether its result could be written to."""
        self._task = task
        self._names = names
        self._plain = plain
        self._inlined = inlined
        self._writers = writers
        self._protects = bool(plain)
        self._stores = stores

    def size_key(self) -> Hashable:
        """Tasks of one layer make results of one size of arguments of one size, mostly."""
        return Recipe, self.key[0] if isinstance(self.key, tuple) and self.key else self.__name__

    def __call__(self, *payloads: Any) -> Any:
        result, writable = returned(self.run(list(payloads)))
        self.writable = writable or self._protects
        self.returned = True
        return result

    def run(self, payloads: list[Any]) -> Any:
        """The result of the task. What writes into its arguments runs again, on copies, as do others of its name."""
        if self.__name__ not in self._writers:
            try:
                return self._task(self._arguments(payloads))
            except (ValueError, TypeError, BufferError) as error:
                if not refuses_writes(str(error)):
                    raise
                self._writers.add(self.__name__)
        return self._task(copied(self._arguments(payloads)))

    def _arguments(self, payloads: list[Any]) -> dict[Any, Any]:
        rest = iter(payloads)
        give = partial(leaving, writable=True) if self._stores else given
        arguments = {name: give(next(rest)) for name in self._names}
        for name, (recipe, count) in self._inlined.items():
            arguments[name] = recipe.run([next(rest) for _ in range(count)])
        return {**self._plain, **arguments}


def recipe_of(
    key: Hashable, task: Task, data: Mapping[Any, Any], writers: set[str], stores: bool = False
) -> tuple[Recipe, list[Held]]:
    """How a task is run, and the values that the recipe takes, in order; it does not keep them.

    `data`: what the task takes, by name: `Held`, `Inlined`, or a plain value. The rest: as for a `Recipe`.
    """
    names = [name for name, value in data.items() if isinstance(value, Held)]
    held = [data[name] for name in names]
    inlined: dict[Any, tuple[Recipe, int]] = {}
    plain: dict[Any, Any] = {}
    for name, value in data.items():
        if isinstance(value, Inlined):
            inlined[name] = value.recipe, len(value.held)
            held += value.held
        elif not isinstance(value, Held):
            plain[name] = protected(value) if is_writable_array(value) and not stores else value
    return Recipe(key, task, names, plain, inlined, writers, stores), held


def with_arrays_apart(task: Any, data: Mapping[Any, Any]) -> tuple[Any, Mapping[Any, Any]]:
    """A task, and what it takes: arrays among its arguments are data, too, so that it cannot write into them."""
    if type(task) is not SpecifiedTask or not any(map(is_writable_array, task.args)):
        return task, data
    apart = {("argument", number): each for number, each in enumerate(task.args) if is_writable_array(each)}
    arguments = [TaskRef(("argument", n)) if ("argument", n) in apart else each for n, each in enumerate(task.args)]
    return SpecifiedTask(task.key, task.func, *arguments, **task.kwargs), {**data, **apart}


def made(handle: Held, held: list[Held], writable: bool) -> Held:
    """What refers to a result that was made of `held`, and could be written to; so could a view of one that could be.

    It is read-only only because a cache has it.
    """
    handle.writable = writable or any(each.writable for each in held)
    handle.depth = 1 + max([each.depth for each in held], default=0)
    return handle


def is_kept(value: Any, nbytes: int) -> bool:
    """Whether a result stays, and its task never runs again.

    To evict what is small would free nothing, and a task with side effects mostly returns None. An object which is no
    container, array or frame may have its state elsewhere, such as a file that tasks append to; not if it is large.
    """
    is_data = isinstance(value, _CONTAINERS) or hasattr(value, "shape")
    return nbytes <= (_SMALL if is_data else _LARGE)


def is_bound_to_worker(spec: Any) -> bool:
    """Whether a task is a coroutine, or uses a function of dask.distributed, such as a shuffle's: it runs once only."""
    return spec.is_coro or any(
        (getattr(each, "__module__", None) or "").startswith("distributed.") for each in uses(spec)
    )


def stores(spec: Any) -> bool:
    """Whether a task of Dask's own writes into an argument on purpose: `da.store` into an array of another task."""
    return any(getattr(each, "__name__", "") in _STORING for each in uses(spec))


def uses(spec: Any) -> Iterator[Any]:
    """What a task calls, and what it has as arguments; of tasks that were fused, all of them."""
    seen, stack = set(), [spec]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, SpecifiedTask):
            stack += [part.func, *part.args, *part.kwargs.values()]
        elif isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, (list, tuple)):
            stack += part
        elif isinstance(part, partial):
            stack += [part.func, *part.args]
        elif callable(part):
            yield part
