"""The storages of the program that a cache knows: one value each, and what happens to it.

A storage belongs to one value of the cache at a time. Sources are what came from outside (parameters, inputs), and what
an operator has written over a source. Before a source is written, all that would be lost with it is seen to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, Final, Literal
from weakref import ref

import torch

import recompute as rc
from recompute import extend
from recompute.extend import EVICTED, RLock, Value, node_of
from recompute_torch._adapter import KeptAdapter, MemoryAdapter
from recompute_torch._blocks import OTHERS
from recompute_torch._holders import Holders
from recompute_torch._memory import (
    Kept,
    Lost,
    Memory,
    Storage,
    copy,
    device_name,
    foreign,
    new_memory,
    same,
    storage_of,
)
from recompute_torch._native import load
from recompute_torch._recipe import immaterial, new_storages, ordinary

Tensor = torch.Tensor

_base_of: Final = attrgetter("_base")

_MAX_COPIED_BYTES: Final = 2**26
"""Bytes: more of memory that is not torch's is not copied; what is made from it cannot be made again."""

_ALIGNED: Final = 16
"""Bytes: nor is memory that kernels read in other steps than its copy, which may change the last bits of sums."""

Special = Literal["", "copied", "unwritten"]
"""Copied: the memory belongs to others, who may write to it, and the value is a copy. Unwritten: an empty buffer."""

_MAX_DEPENDENTS: Final = 256
"""Calls that are looked at to see what depends on a source."""


def _taken(values: deque[Value]) -> Iterator[Value]:
    """As many values as there are now, taken out of a queue; fewer where another thread takes some."""
    with suppress(IndexError):
        for _ in range(len(values)):
            yield values.popleft()


class Handle(rc.Recomputable[Any]):
    """What a storage of the program has to do with the cache: the value that it holds."""

    __slots__ = ("special", "tracker")
    special: Special
    tracker: Storages


class Storages:
    """Which storage has which value, from the first meeting to the end of the block."""

    def __init__(self, cache: rc.Cache, history: int, *, moves: bool = False, verifies: bool = False) -> None:
        self.cache: Final = cache
        self._moves: Final = moves  # there are tiers: sources may leave memory, too
        self._verifies: Final = verifies  # digests are kept of what sources hold
        self.holders: Final = Holders()
        self.whole = 0
        """Bytes that were alive at most, evicted or not, as gradients arrived: activations are most numerous then."""
        self.closed = False
        self._hooks: list[Any] = []  # on parameters
        self.stepping: set[int] = set()  # threads in which an optimizer makes a step
        self.spare: dict[str, float] = {}  # bytes by device that such a step must leave free if it records nothing
        self.orphans: Final = cache.extend.released_sources()
        self._kept: Final[deque[Value]] = deque()  # those of them that were found to be worth their memory
        self._history = history
        self._known: dict[int, ref[Storage]] = {}  # by address, so those that are gone give way to new ones
        self._lent: dict[int, list[tuple[Tensor, ref[Any] | None]]] = {}  # by thread: see `lend`
        self._meeting = RLock()  # one thread at a time makes storages known, or strangers again

    def _enter(self, storage: Storage, handle: Handle, special: Special = "") -> Handle:
        """Let a storage hold a value."""
        handle.tracker = self
        handle.special = special
        self._known[id(storage)] = ref(storage)  # first: what holds a value must be found when the block is left
        storage._recompute = handle  # type: ignore[attr-defined]  # ours
        load.belongs_to_another(storage)
        return handle

    def _source(self, storage: Storage, special: Special = "") -> Handle:
        """A storage that is new to the cache."""
        with self._meeting:
            other: Handle | None = getattr(storage, "_recompute", None)
            if other is not None:
                if other.tracker is self:  # another thread has met it just now
                    return other
                raise RuntimeError(OTHERS)
            if load.has(storage):
                raise RuntimeError(OTHERS)
            if special == "copied":
                return self._enter(
                    storage, self.cache.extend.source(new_memory(copy(storage)), Handle, moves=False), special
                )
            if hasattr(storage, "_passing"):
                self.cache.extend.unhold(storage._passing)
                del storage._passing
            memory = Memory(device_name(storage.device), storage.nbytes(), ref(storage), None)
            try:
                memory.keep()
                return self._enter(storage, self.cache.extend.source(memory, Handle, moves=not special), special)
            except BaseException:
                memory.give_back()
                raise

    def _handle(self, tensor: Tensor) -> Any:
        """What refers to the value of a tensor, which becomes a source if it is new; None: it has no bytes."""
        if tensor.layout is not torch.strided or immaterial(tensor):
            return None
        storage = storage_of(tensor)
        handle = getattr(storage, "_recompute", None)
        if not ordinary(tensor):
            return handle  # it may look at a tensor that belongs to the cache, but is never one itself
        if handle is not None and handle.special == "copied" and not same(node_of(handle).payload.storage, storage):
            handle = None  # it was written to: it is another value now
            del storage._recompute  # type: ignore[attr-defined]  # ours
        if handle is None or handle.tracker is not self:
            others = foreign(storage) and not isinstance(
                tensor, torch.nn.Parameter
            )  # a model is changed by operators alone
            if not storage.nbytes() or (
                others and (storage.nbytes() > _MAX_COPIED_BYTES or storage.data_ptr() % _ALIGNED)
            ):
                return None
            parameter = _base_of(tensor) if tensor._is_view() else tensor  # below autograd a matrix may be transposed
            if isinstance(parameter, torch.nn.Parameter):
                self.holders.meet(parameter)
                if parameter.requires_grad and parameter.is_leaf:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._keep_gradient))
            return self._source(storage, "copied" if others else "")
        return handle

    def _keep_gradient(self, parameter: Tensor) -> None:
        """A gradient that has arrived at its parameter is needed at the step, with all others: it stays until then."""
        gradient = parameter.grad
        load = self.cache.extend.load()
        self.whole = max(self.whole, load.missing + load.used)
        if gradient is not None and not self.closed and ordinary(gradient):
            self.keep(gradient)

    def begin_step(self) -> None:
        """An optimizer makes a step in this thread, which may take half of what is free without a record of it."""
        self.spare = {device: self.cache.extend.room(device) / 2 for device in self.cache.extend.pools()}
        self.stepping.add(get_ident())

    def meet(self, tensor: Tensor) -> None:
        """What an optimizer remembers is known, if its step has made it without a record."""
        if ordinary(tensor) and hasattr(storage_of(tensor), "_passing"):
            self._source(storage_of(tensor))

    def keep(self, tensor: Tensor) -> None:
        """What a tensor has stays, whatever it was made of."""
        handle = getattr(storage_of(tensor), "_recompute", None)
        if handle is not None:
            self._fix(node_of(handle))

    def _count(self, tensor: Tensor) -> None:
        """A tensor that nothing will depend on, as long as it is no value: its bytes are counted until they go."""
        for storage in new_storages(tensor):
            self._known[id(storage)] = ref(storage)
            device = device_name(storage.device)
            held = self.cache.extend.hold(storage, device, storage.nbytes())
            storage._passing = held  # type: ignore[attr-defined]  # ours

    def _free_source(self, tensor: Tensor) -> bool:
        """Whether a tensor is a source on which nothing depends."""
        storage = storage_of(tensor) if ordinary(tensor) else None
        handle = getattr(storage, "_recompute", None)
        if handle is None:
            return hasattr(storage, "_passing")
        mine, node = handle.tracker is self and not handle.special, node_of(handle)
        return mine and node.operation is None and (node.users is None or not self.cache.extend.needed(node))

    def _made_here(self, tensor: Any) -> bool:
        """Whether an operation has made what a tensor holds."""
        if not isinstance(tensor, Tensor):
            return False
        handle = self._handle(tensor)
        return handle is not None and (node_of(handle).operation is not None or self._unwritten(handle))

    def _unwritten(self, handle: Handle) -> bool:
        return handle.special == "unwritten" and not self.cache.extend.needed(node_of(handle))

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
            source = node_of(handle)
            self._fix(source)
            if self._moves and handle.special == "unwritten":
                self.cache.extend.detach(source, moves=True)
            handle.special = ""
            if not self.cache.extend.needed(source):
                continue
            alive = [node for node in self.cache.extend.dependents(source) or () if node.operation is not None]
            size = sum(storage.size for storage in {node.storage for node in alive})
            if size > source.storage.size and self.cache.budget is not None and get_ident() not in self.stepping:
                self._part(storage_of(tensor), source)
                continue
            with suppress(rc.BudgetError):
                for node in alive:
                    self._fix(node)
            if self.cache.extend.needed(source):  # for what did not fit, or what another thread is just making
                self._part(storage_of(tensor), source)
            self.orphans.extend(_taken(self._kept))  # fewer depend on them: some are not worth their memory any more

    @contextmanager
    def staying(self, node: Value) -> Iterator[None]:
        """A value is in memory inside the block."""
        with ExitStack() as until:
            while True:
                with suppress(Lost):
                    until.enter_context(self.cache.extend.keep(node))
                    break
            yield

    def _fix(self, node: Value) -> None:
        """Make it a source, whatever it was made of; unless nothing can need it any more."""
        while node.operation is not None:
            memory = node.payload
            outer = memory.outer() if isinstance(memory, Memory) and memory.outer is not None else None
            try:
                if outer is not None and not self._moves:  # as long as it has a name here, the bytes cannot go
                    self.cache.extend.detach(node)
                    self._keep(node.payload)
                else:
                    with self.staying(node):
                        if self._keep(node.payload):
                            self.cache.extend.detach(node)
            except Lost:
                pass  # once more
            except RuntimeError:
                if node.operation is not None:  # else it went, just now
                    raise

    def _fix_in_memory(self, node: Value) -> None:
        """Make it a source that no tier takes."""
        self._fix(node)
        if not node.stays:
            self.cache.extend.detach(node, moves=False)

    def hold(self, given: Iterable[Tensor]) -> None:
        """Sources that are written unseen stay in memory."""
        for tensor in given:
            handle = self._handle(tensor) if self._moves else None
            if handle is not None:
                self._fix_in_memory(node_of(handle))

    def wrote(self, given: Iterable[Tensor]) -> None:
        """Sources, which are in memory, are about to be written: what tiers and digests tell of them is out of date."""
        for tensor in given if self._moves or self._verifies else ():
            handle = getattr(storage_of(tensor), "_recompute", None)
            if handle is not None:
                self.cache.extend.written(node_of(handle))

    def _keep(self, memory: Any) -> bool:
        """Whether there are bytes that stay when their tensor goes."""
        with self._meeting:
            return not isinstance(memory, Memory) or memory.keep()  # not: what a call left that was interrupted

    def _part(self, storage: Storage, source: Value) -> None:
        """Keep a copy of a source for what is made from it; the storage becomes a source of its own."""
        with self._meeting, self.staying(source):
            memory = source.payload
            kept = copy(memory.storage)
            memory.give_back(
                partial(setattr, memory, "outer", None),
                partial(setattr, memory, "own", kept),
                partial(setattr, memory, "__class__", Kept),
                partial(delattr, storage, "_recompute"),
            )
            self._source(storage)

    def _tidy(self) -> None:
        """Let go of sources that take more memory than what could be made of them, and of a history that is too long.

        A momentum remembers all gradients that went into it, unless it is asked what that is worth.
        """
        for source in _taken(self.orphans):
            if source.referred or not self.cache.extend.needed(source):
                continue
            alive = self.cache.extend.dependents(source, _MAX_DEPENDENTS)
            if alive is not None and sum(node.storage.size for node in alive) <= source.storage.size:
                for node in alive:
                    self._fix(node)
            else:
                self._kept.append(source)
        if self.cache.extend.history > self._history:
            self.commit()

    def _disown(self, storage: Storage) -> None:
        """The storage has other memory than the cache thinks: it is new to it."""
        handle: Handle | None = getattr(storage, "_recompute", None)
        if handle is None:
            return
        node = node_of(handle)
        extend.forget_outline(node)
        leave = partial(delattr, storage, "_recompute")
        if node.payload is EVICTED:
            leave()
        else:
            node.payload.give_back(partial(setattr, node.payload, "outer", None), leave)

    def forget(self, given: Iterable[Tensor]) -> None:
        """Let the tensors be strangers, with their content, as they were before the cache met them."""
        self.own(given)
        for tensor in given:
            self.hand_out(storage_of(tensor))

    def hand_out(self, storage: Storage) -> None:
        """The program gets at the memory: it is no longer the cache's, unless it is needed to make others."""
        with self._meeting:
            handle = getattr(storage, "_recompute", None)
            if handle is None:
                return
            node = node_of(handle)
            self._fix_in_memory(node)
            if not self.cache.extend.needed(node):
                node.payload.give_back(partial(delattr, storage, "_recompute"))

    def taken_here(self, handle: Handle) -> bool:
        """Whether the operator that runs here takes the value: it may do with the memory what its schema says."""
        frame = extend.running()
        return frame is not None and node_of(handle) in frame.arguments

    def lend(self, tensor: Tensor, to: Any) -> None:
        """The operator that runs here has got something that refers to the memory of its argument.

        When it is over that must be gone, or the memory is no longer the cache's: see `_take_back`.
        """
        try:
            reference = None if isinstance(to, Storage) else ref(to)  # the storage is the tensor's own, and stays
        except TypeError:  # there is no telling how long it lives
            reference = None
        self._lent.setdefault(get_ident(), []).append((tensor, reference))

    def _take_back(self) -> None:
        """Give up the memory of what the operator that just ran has kept."""
        lent = self._lent.pop(get_ident(), ())
        self.forget([tensor for tensor, reference in lent if reference is None or reference() is not None])

    def fork(self) -> None:
        """In a child process: what was evicted is made again when it is touched, and no budget holds."""
        self._meeting = RLock()  # another thread may have held it
        self.cache.budget = None

    def known(self) -> list[Storage]:
        """The storages of the program that are alive and belong to values of the cache."""
        alive = [reference() for reference in list(self._known.values())]
        return [storage for storage in alive if storage is not None and hasattr(storage, "_recompute")]

    def give_back(self, nodes: Iterable[Value]) -> None:
        """Results of operations belong to the storages of the program again, as their allocator expects."""
        for node in nodes:
            if node.operation is not None and isinstance(node.payload, Memory):
                node.payload.give_back()

    def keep_all(self) -> None:
        """Values in memory stay when the program needs them no more, if evicted values are made from them."""
        for storage in self.known():
            handle: Handle | None = getattr(storage, "_recompute", None)
            memory = None if handle is None else node_of(handle).payload
            if isinstance(memory, Memory) and not memory.tiny:
                memory.keep()

    def commit(self) -> None:
        """Forget how everything was made: what is alive becomes a source."""
        for storage in self.known():
            self._fix(node_of(storage._recompute))  # type: ignore[attr-defined]  # ours

    def leave(self) -> None:
        """Give all storages back to the program, with their bytes: one by one, so that the budget mostly does."""
        self.closed = True
        self.cache.extend.be_lenient()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        errors: list[BaseException] = []
        for storage in filter(None, [reference() for reference in list(self._known.values())]):
            if hasattr(storage, "_passing"):
                self._source(storage)
        node_of = attrgetter("_recompute._node")
        for storage in sorted(self.known(), key=lambda kept: (node_of(kept).payload is EVICTED, node_of(kept).number)):
            node = node_of(storage)
            try:
                self._fix_in_memory(node)
                node.payload.give_back(partial(delattr, storage, "_recompute"))
            except BaseException as error:  # an interrupt, too: the others still need their content
                errors.append(error)
        self._known.clear()
        self._lent.clear()
        self.cache.flush()
        if errors:
            raise errors[0]


rc.adapters.register(Memory, MemoryAdapter())
rc.adapters.register(Kept, KeptAdapter())
