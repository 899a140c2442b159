"""What changes an array in place, as an operation: functionalization.

A write makes a new version of the array at the root of the memory that is written to: a copy is changed, through the
same view of it. Then the array and all of its views are let refer to the new version and to the same views of that, all
of them or, if anything fails, none. What was computed before the write keeps the version that it was computed from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dis import opname
from functools import lru_cache
from types import FrameType, MappingProxyType
from typing import Any, Final

from recompute import text
from recompute._adapters.adapter import kinds
from recompute._adapters.arrays import ArrayAdapter, Outline
from recompute._arrays.operate import call, operate
from recompute._arrays.sharing import Memory, Origin, Path, Step, check_writable, memory_of, path_of
from recompute._interrupts import is_interrupt
from recompute._recomputable import Recomputable
from recompute.extend import Value

_SHARED: Final = "another array shares memory with it, but not in a way that is known; change a copy: x = x.copy()"

_ATTEMPTS: Final = 10
"""To let arrays refer to a new version: each but the last may be interrupted."""


class Changed:
    """A function that changes its first argument, as one that returns a changed copy.

    With a path the first arguments are the root of that and what else it takes; what is changed is the view at its end,
    and the copy that is returned is one of the root.
    """

    __slots__ = ("func", "path", "returns")
    args: Final = ()  # beside these, func is named and known as that of a functools.partial
    keywords: Final[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, func: Callable[..., Any], returns: bool = True, path: Path | None = None) -> None:
        self.func = func
        self.returns = returns  # whether it may return something else, which is the result then
        self.path = path

    def __call__(self, array: Any, *args: Any, **keywords: Any) -> Any:
        copy = copied(array, elements=self.func is operator.setitem)
        if self.path is None:
            result = self.func(copy, *args, **keywords)
            return copy if result is None or not self.returns else result
        given = self.path.given - 1
        view = self.path(copy, *args[:given])
        result = self.func(view, *args[given:], **keywords)
        if result is not None and result is not view and self.returns:
            raise TypeError(f"{text.name_of(self.func)} made another array instead of changing its operand in place")
        return copy


class Version:
    """A change of one or more arrays on a memory that others share, in the making."""

    def __init__(self, memory: Memory) -> None:
        root = memory.root
        if root is None or root not in root.storage.values:
            raise RuntimeError(_SHARED)
        self.memory = memory
        self._members = memory.arrays()
        self._paths = [None if array._origin is None else path_of(array._origin) for array in self._members]
        self.wrap = type(self._members[0])
        self.cache = self._members[0].cache
        self.root: Recomputable[Any] = self.wrap(self.cache, root)

    def path_to(self, array: Any) -> tuple[Path | None, list[Recomputable[Any]]]:
        """How a member is made of the root, and what else that takes."""
        for member, found in zip(self._members, self._paths, strict=True):
            if member is array and found is not None:
                path, inputs = found
                return path, [Recomputable(self.cache, node) for node in inputs]
        return None, []

    def arrive(self, root: Any, caller: FrameType) -> None:
        """Let all members refer to the same views of a new root."""
        arrivals = []
        for array, found in zip(self._members, self._paths, strict=True):
            if found is None:
                new = self.wrap(self.cache, root._node)
            else:
                values = (root._node, *found[1])
                new = operate(self.wrap, self.cache, found[0], values, values, caller)
                if new._node.storage is not root._node.storage:
                    raise RuntimeError(_SHARED)
            arrivals.append((array, new, new._node))
        self._refer_all(root._node, arrivals, _ATTEMPTS)

    def _refer_all(self, root: Value, arrivals: Sequence[tuple[Any, Any, Value]], attempts: int) -> None:
        """All or none, although interrupts may come, one after the other."""
        try:
            self._refer(root, arrivals)
        except BaseException:
            if attempts > 1:
                self._refer_all(root, arrivals, attempts - 1)
            raise

    def _refer(self, root: Value, arrivals: Sequence[tuple[Any, Any, Value]]) -> None:
        for array, new, node in arrivals:
            if array._node is not node:
                array.cache.extend.exchange(array, new)
            if array._origin is not None:
                array._origin = Origin(node, ((root, None),))
        self.memory.root = root


def change(
    array: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    caller: FrameType,
    *,
    returns: bool = True,
) -> Any:
    """Let an array, and all that share its memory, refer to what `function` makes of them by changing it in place."""
    memory = shares(array)
    if memory is not None or not _is_changed(array._node):
        check_writable(array)
    if memory is not None:
        version = Version(memory)
        path, inputs = version.path_to(array)
        changed = Changed(function, returns, path)
        root = call(version.wrap, array.cache, changed, (version.root, *inputs, *args), keywords, caller, nout=1)
        version.arrive(root, caller)
        return array
    changed = Changed(function, returns)
    become(array, call(type(array), array.cache, changed, (array, *args), keywords, caller, nout=1))
    return array


def _is_changed(value: Value) -> bool:
    """Whether it is what a change has made, in memory of its own, which can be written to."""
    return value.operation is not None and type(value.operation.function) is Changed


def become(array: Any, version: Any) -> None:
    """Let an array that shares its memory with no other refer to a new version, on memory of its own."""
    memory = memory_of(array)
    if memory is not None:  # first: an interrupt may come meanwhile, and no other array is on the memory
        memory.leave(array)
    array._become(version)


def is_item(array: Any, key: Any, content: Any, caller: FrameType) -> bool:
    """Whether `content` is `array[key]` itself, so that to assign it changes nothing: `x[key] += y` does so at its end.

    Raises TypeError for an assignment of what shares memory with the array that is no statement: a compiled function
    that swaps rows, as NumPy's `shuffle` does, takes these for copies.
    """
    memory = memory_of(content)
    if memory is None or memory is not memory_of(array):
        return False
    found = _steps(content)
    before = _steps(array)
    if found and before is not None and len(found) == len(before) + 1 and is_fixed(key):
        last = found[-1]
        if last.function is operator.getitem and last.positional[1] == key and all(map(Step.same, found, before)):
            return True
    if not opname[caller.f_code.co_code[caller.f_lasti]].startswith("STORE_S"):
        raise TypeError(
            "a part of an array was assigned to another part of it, but not by a statement, x[i] = x[j]; what does so, "
            "such as shuffle, may take views for copies. To shuffle: x[...] = generator.permutation(x)"
        )
    return False


def _steps(array: Any) -> tuple[Step, ...] | None:
    """The way from the root to an array, if it was gone in one step."""
    origin = array._origin
    if origin is None:
        return ()
    function = None if origin.node.operation is None else origin.node.operation.function
    return function.steps if type(function) is Path else None


def is_fixed(part: Any) -> bool:
    """Whether a part of an index is a number, a slice of numbers, None or an ellipsis."""
    cls = type(part)
    if cls is slice:
        return is_fixed(part.start) and is_fixed(part.stop) and is_fixed(part.step)
    return cls is int or part is None or part is ... or (cls is tuple and all(map(is_fixed, part)))


def shares(array: Any) -> Memory | None:
    """The memory of an array, if others are on it that can be changed with it."""
    memory = memory_of(array)
    if memory is None or len(memory.members) < 2 or not library_writes(array._type, array.dtype):
        return None
    return memory


@lru_cache(1024)
def is_plain(cls: type, dtype: Any) -> bool:
    """Whether it is the library's own type of arrays: no scalar, no subclass. New memory is of that type."""
    return type(adapter_for(cls).empty(Outline(cls, (0,), dtype))) is cls


@lru_cache(1024)
def is_array(cls: type, dtype: Any) -> bool:
    """Whether it is the library's own type of arrays or a subclass of that: no scalar."""
    return issubclass(cls, type(adapter_for(cls).empty(Outline(cls, (0,), dtype))))


@lru_cache(1024)
def library_writes(cls: type, dtype: Any) -> bool:
    """Whether arrays of this library can be written to; else methods such as `sort` return another array."""
    array = adapter_for(cls).empty(Outline(cls, (1,), dtype))
    try:
        array[...] = array
    except Exception as error:  # each library has its own
        if is_interrupt(error):
            raise
        return False
    return True


def is_changeable(cls: type, dtype: Any) -> bool:
    """Whether it can be changed in place: neither a scalar, nor of a library whose arrays never change."""
    return is_array(cls, dtype) and library_writes(cls, dtype)


def is_dense(outline: Outline) -> bool:
    """Whether the elements lie side by side, forwards in some order of axes: as in new memory for that outline."""
    if outline.strides is None or 0 in outline.shape:
        return True
    distance = outline.itemsize
    for step, length in sorted(zip(outline.strides, outline.shape, strict=True)):
        if length != 1:
            if step != distance:
                return False
            distance *= length
    return True


def adapter_for(cls: type) -> ArrayAdapter:
    adapter = kinds[cls].array
    if adapter is None:
        raise TypeError(f"out must be an array, not a {cls.__name__}")
    return adapter


def copied(array: Any, *, elements: bool = False) -> Any:
    """A copy that may be written to; with `elements` also of a scalar, as an array without dimensions."""
    adapter = adapter_for(type(array))
    if elements and adapter.constant(array):
        return adapter.namespace().asarray(array)
    return adapter.clone(array)
