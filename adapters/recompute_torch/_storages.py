"""The storages of the program that a cache knows: one value each, and what happens to it.

A storage belongs to one value of the cache at a time. Sources are what came from outside (parameters, inputs), and what
an operator has written over a source. Before a source is written, all that would be lost with it is seen to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from threading import Condition, Lock, RLock, get_ident
from typing import Any, Final, Literal
from weakref import ref

import torch

import recompute as rc
from recompute._engine.graph import EVICTED, Value
from recompute._engine.references import INTERRUPT
from recompute._engine.repair import HANDLES
from recompute_torch._memory import Memory, Storage, copy, device_name, foreign, new_memory, same, storage_of
from recompute_torch._recipe import ordinary

Tensor = torch.Tensor

_COPIED: Final = 2**26
"""Bytes: more of somebody else's memory is not copied; what is made from it cannot be made again."""

Special = Literal["", "copied", "unwritten"]
"""Copied: the memory belongs to others, who may write to it, and the value is a copy. Unwritten: an empty buffer."""

_LOOK: Final = 256
"""Calls that are looked at to see what depends on a source."""


class Handle(rc.Recomputable[Any]):
    """What a storage of the program has to do with the cache: the value that it holds."""

    __slots__ = ("special", "tracker")

    def __init__(self, tracker: Storages, value: Value, special: Special = "") -> None:
        self._cache = tracker.cache
        self._value = value
        self.tracker = tracker
        self.special: Special = special

    def __del__(self) -> None:
        try:
            value = self._value
            if value.operation is None and value.uses:
                self.tracker.orphans.append(value)
            self._cache._drop(value)
        except KeyboardInterrupt:  # as in Recomputable
            self._cache._interrupted = True
            self._cache._dropped.append(INTERRUPT)
        except AttributeError:  # interrupted before it was complete
            return


HANDLES.append(Handle)


class Storages:
    """Which storage has which value, from the first meeting to the end of the block."""

    def __init__(self, cache: rc.Cache, history: int) -> None:
        self.cache: Final = cache
        self.closed = False
        self._hooks: list[Any] = []  # on parameters
        self.stepping: set[int] = set()  # threads in which an optimizer makes a step
        self.orphans: list[Value] = []  # sources that the program has let go of, and that are needed to make others
        self._kept: list[Value] = []  # those of them that were found to be worth their memory
        self._history = history
        self._known: dict[int, ref[Storage]] = {}  # by address, so those that are gone give way to new ones
        self._meeting: Final = RLock()  # one thread at a time makes storages known, or strangers again

    def _enter(self, storage: Storage, value: Value, special: Special = "") -> Any:
        handle = storage._recompute = Handle(self, value, special)  # type: ignore[attr-defined]  # ours
        self._known[id(storage)] = ref(storage)
        return handle

    def _source(self, storage: Storage, special: Special = "") -> Any:
        with self._meeting:
            other = getattr(storage, "_recompute", None)
            if other is not None:
                if other._cache is self.cache:  # another thread has met it just now
                    return other
                raise RuntimeError(
                    "a tensor belongs to another budget block that is still open; let all threads that share tensors "
                    "enter one block: with block: ..."
                )
            if special == "copied":
                with self.cache._noting:
                    return self._enter(storage, self.cache._add_source(new_memory(copy(storage))), special)
            memory = Memory(device_name(storage.device), storage.nbytes(), ref(storage), None)
            try:
                memory.keep()
                with self.cache._noting:
                    return self._enter(storage, self.cache._add_source(memory), special)
            except BaseException:
                memory.give_back()
                raise

    def _handle(self, tensor: Tensor) -> Any:
        """What refers to the value of a tensor, which becomes a source if it is new; None: it has no bytes."""
        if tensor.layout is not torch.strided or tensor.is_meta or tensor._is_zerotensor():
            return None
        storage = storage_of(tensor)
        handle = getattr(storage, "_recompute", None)
        if not ordinary(tensor):
            return handle  # it may look at a tensor that belongs to the cache, but is never one itself
        if handle is not None and handle.special == "copied" and not same(handle._value.payload.storage, storage):
            handle = None  # somebody has written to it: it is another value now
            del storage._recompute  # type: ignore[attr-defined]  # ours
        if handle is None or handle._cache is not self.cache:
            others = foreign(storage) and not isinstance(
                tensor, torch.nn.Parameter
            )  # a model is changed by operators alone
            if not storage.nbytes() or (others and storage.nbytes() > _COPIED):
                return None
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad and tensor.is_leaf:
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._keep_gradient))
            return self._source(storage, "copied" if others else "")
        return handle

    def _keep_gradient(self, parameter: Tensor) -> None:
        """A gradient that has arrived at its parameter is needed at the step, with all others: it stays until then."""
        gradient = parameter.grad
        if gradient is not None and not self.closed and ordinary(gradient):
            handle = getattr(storage_of(gradient), "_recompute", None)
            if handle is not None and handle._value.operation is not None:
                self._fix(handle._value)

    def _drop(self, value: Value) -> None:
        """Nobody has use for an output."""
        with self.cache._noting:
            self.cache._drop(value)

    def _free_source(self, tensor: Tensor) -> bool:
        """Whether a tensor is a source on which nothing depends."""
        handle = getattr(storage_of(tensor), "_recompute", None) if ordinary(tensor) else None
        if handle is None or handle._cache is not self.cache or handle.special:
            return False
        return handle._value.operation is None and not handle._value.uses

    def _made_here(self, tensor: Any) -> bool:
        """Whether an operation has made what a tensor holds."""
        if not isinstance(tensor, Tensor):
            return False
        handle = self._handle(tensor)
        return handle is not None and (handle._value.operation is not None or self._unwritten(handle))

    def _unwritten(self, handle: Handle) -> bool:
        return handle.special == "unwritten" and not handle._value.uses

    def bring(self, storage: Storage) -> bool:
        """Make sure that a storage has its bytes; whether they had to be made again."""
        handle = getattr(storage, "_recompute", None)
        if handle is None or handle._value.payload is not EVICTED:
            return False
        handle._cache._bring(handle._value, _nothing)
        return True

    def own(self, given: Iterable[Tensor]) -> None:
        """Make sources of what the tensors hold, which are about to be written: nothing depends on them any more.

        What was made from a source could not be made again once it is written. In a step of an optimizer, what is alive
        of that (gradients, losses) is kept for good, and all that led to it is forgotten: so a training remembers one
        step. Elsewhere a copy of the source is kept instead, if that is smaller.
        """
        for tensor in given:
            handle = self._handle(tensor)
            if handle is None or handle.special == "copied":
                continue
            handle.special = ""
            value = handle._value
            if value.operation is not None:
                self._fix(value)
            if not value.uses:
                continue
            alive = [each for each in self._alive(value, inf) or () if each.operation is not None]
            size = sum(each.size for each in {each.storage for each in alive})
            if size > value.storage.size and self.cache.budget is not None and get_ident() not in self.stepping:
                self._part(storage_of(tensor), value)
                continue
            try:
                for each in alive:
                    self._fix(each)
            except rc.BudgetError:
                self._part(storage_of(tensor), value)
            self.orphans += self._kept  # with fewer that depend on them, some are not worth their memory any more
            self._kept.clear()

    @contextmanager
    def staying(self, handle: Handle) -> Iterator[None]:
        """What a storage holds is in memory inside the block."""
        cache, value = self.cache, handle._value
        cache._bring(value, _lock)
        try:
            yield
        finally:
            with cache._noting, cache._lock:
                value.storage.pool.unlock(value.storage)
                cache._evict_late((value,))

    def _fix(self, value: Value) -> None:
        """A source from now on, in memory, whatever it was made of."""
        self.cache._bring(value, self.cache._detach)
        with self._meeting:
            if isinstance(value.payload, Memory):  # else it is what a call left that was interrupted
                value.payload.keep()

    def _part(self, storage: Storage, source: Value) -> None:
        """Keep a copy of a source for what is made from it; the storage becomes a source of its own."""
        with self._meeting:
            memory = source.payload
            kept = copy(memory.storage)
            memory.give_back()
            memory.outer, memory.own = None, kept
            del storage._recompute  # type: ignore[attr-defined]  # ours
            self._source(storage)

    def _alive(self, source: Value, most: float) -> list[Value] | None:
        """What the program holds and what would have to be made from `source`; None: more calls than `most` to see."""
        alive: dict[Value, None] = {}
        seen = {source}
        stack = [source]
        with self.cache._noting, self.cache._lock:
            while stack:
                for user in stack.pop().living_users():
                    for output in user.outputs:
                        if output is None or output in seen:
                            continue
                        seen.add(output)
                        if output.refs:
                            alive[output] = None
                        else:
                            stack.append(output)
                if len(seen) > most:
                    return None
        return list(alive)

    def _tidy(self) -> None:
        """Let go of sources that take more memory than what could be made of them, and of a history that is too long.

        A momentum remembers all gradients that went into it, if nobody asks what that is worth.
        """
        orphans, self.orphans = self.orphans, []
        for source in orphans:
            if source.refs or not source.uses:
                continue
            alive = self._alive(source, _LOOK)
            if alive is not None and sum(each.storage.size for each in alive) <= source.storage.size:
                for value in alive:
                    if value.operation is not None:
                        self._fix(value)
            else:
                self._kept.append(source)
        if self.cache._history > self._history:
            self.commit()

    def _disown(self, storage: Storage) -> None:
        """The storage has other memory than the cache thinks: it is new to it from now on."""
        value = storage._recompute._value  # type: ignore[attr-defined]  # ours
        value.outline = None
        if value.payload is not EVICTED:
            value.payload.outer = None
        del storage._recompute  # type: ignore[attr-defined]  # ours

    def forget(self, given: Iterable[Tensor]) -> None:
        """Let the tensors be strangers, with their content, as they were before the cache met them."""
        self.own(given)
        for tensor in given:
            self.hand_out(storage_of(tensor))

    def hand_out(self, storage: Storage) -> None:
        """Somebody gets at the memory: it is no longer the cache's, unless it is needed to make others."""
        with self._meeting:
            handle = getattr(storage, "_recompute", None)
            if handle is None:
                return
            value = handle._value
            if value.operation is not None:
                self._fix(value)
            if not value.uses:
                value.payload.give_back()
                del storage._recompute  # type: ignore[attr-defined]  # ours

    def fork(self) -> None:
        """In a child process: what was evicted is made again when it is touched, and no budget holds."""
        cache = self.cache
        cache._lock = Lock()  # another thread may have held it
        cache._changed = Condition(cache._lock)
        cache._interrupted = True  # and may have been in the middle of something
        cache.budget = None

    def known(self) -> list[Storage]:
        """The storages of the program that are alive and belong to values of the cache."""
        found = [each() for each in list(self._known.values())]
        return [each for each in found if each is not None and hasattr(each, "_recompute")]

    def commit(self) -> None:
        """Forget how everything was made: what is alive is a source from now on."""
        for storage in self.known():
            if storage._recompute._value.operation is not None:  # type: ignore[attr-defined]  # ours
                self._fix(storage._recompute._value)  # type: ignore[attr-defined]  # ours

    def leave(self) -> None:
        """Give all storages back to the program, with their bytes."""
        self.closed = True
        self.cache.budget = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        errors: list[BaseException] = []
        for storage in self.known():
            value = storage._recompute._value  # type: ignore[attr-defined]  # ours
            try:
                if value.operation is not None:
                    self._fix(value)
                value.payload.give_back()
                del storage._recompute  # type: ignore[attr-defined]  # ours
            except BaseException as error:  # an interrupt, too: the others still need their content
                errors.append(error)
        self._known.clear()
        self.cache._flush_trace()
        if errors:
            raise errors[0]


def _lock(value: Value) -> None:
    value.storage.pool.lock(value.storage)


def _nothing(value: Value) -> None:
    """What is done with a value that is only to be in memory."""
