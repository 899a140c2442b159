"""What happens to each operator call inside a block: it is recorded, or its arguments stay while it looks at them.

A storage of the program belongs to one value of the cache at a time. An operator that makes tensors is an operation;
one that writes to a tensor is an operation too, whose output takes over the storage. Sources are what came from
outside: parameters, inputs, and what an operator has written over a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from sys import _getframe
from threading import Condition, Lock, RLock, get_ident
from types import FrameType
from typing import Any, Final
from weakref import ref

import torch

import recompute as rc
from recompute._graph import EVICTED, Operation, Value
from recompute._lifetimes import INTERRUPT
from recompute._repair import HANDLES
from recompute_torch._memory import Memory, Storage, copy, device_name, foreign, new_memory, same, storage_of
from recompute_torch._recipe import Blank, Call, Look, Write, geometry_of, new_storages, ordinary, tensors
from recompute_torch._rules import Rule, rule_of
from recompute_torch._shortage import out_of_memory

Tensor = torch.Tensor

Parameter = torch.nn.Parameter

_CONSTANTS: Final = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)

_COPIED: Final = 2**26
"""Bytes: more of somebody else's memory is not copied; what is made from it cannot be made again."""

_LOOK: Final = 256
"""Calls that are looked at to see what depends on a source."""

_NONE: Final[dict[str, Any]] = {}


class Handle(rc.Recomputable[Any]):
    """What a storage of the program has to do with the cache: the value that it holds."""

    __slots__ = ("copied", "tracker")

    def __init__(self, tracker: Tracker, value: Value, copied: bool = False) -> None:
        self._cache = tracker.cache
        self._value = value
        self.tracker = tracker
        self.copied = copied  # the memory belongs to others, who may write to it: the value is a copy

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


class Tracker:
    """The storages of the program that a cache knows, and the calls on them."""

    def __init__(
        self,
        cache: rc.Cache,
        history: int,
        everything: bool,
        watching: Callable[[Tracker], AbstractContextManager[Any]],
    ) -> None:
        self.cache: Final = cache
        self.closed = False
        self._meeting: Final = RLock()  # one thread at a time makes storages known, or strangers again
        self.stepping: set[int] = set()  # threads in which an optimizer makes a step
        self.alone = True  # one thread is in the block: operators may run while the cache is locked
        self.watching: Final = watching  # makes the mode that brings calls here
        self._history = history
        self._everything = everything
        self._funcs: list[Any] = []  # those that the rules are known of, by what identifies them as long as they live
        self.orphans: list[Value] = []  # sources that the program has let go of, and that are needed to make others
        self._kept: list[Value] = []  # those of them that were found to be worth their memory
        self._known: dict[int, ref[Storage]] = {}  # by address, so those that are gone give way to new ones
        self.rules: dict[int, tuple[Callable[..., Any], Rule]] = {}

    def learn(self, func: Any) -> tuple[Callable[..., Any], Rule]:
        """What to do with an operator; asked once for each overload."""
        rule = rule_of(func)
        self._funcs.append(func)
        method = getattr(self, f"_{rule.what}")
        known = self.rules[id(func)] = (method if self._everything else self._if_checkpointed(method), rule)
        return known

    def _if_checkpointed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Only calls with an argument that belongs to the cache are its business."""

        def call(func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
            for each in tensors([*args, *kwargs.values()]):
                if each.layout is torch.strided and hasattr(storage_of(each), "_recompute"):
                    return method(func, rule, args, kwargs)
            return func(*args, **kwargs)

        return call

    # The kinds of calls

    def _makes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """All outputs are new: an operation."""
        values: list[Value] = []
        cache = self.cache
        template: list[Any] | None = [] if rule.plain and not kwargs else None  # benchmarks/torch_overhead.py: hot path
        if template is not None:
            for each in args:
                cls = type(each)
                if cls is Tensor or cls is Parameter:
                    try:
                        handle = storage_of(each)._recompute  # type: ignore[attr-defined]  # ours
                    except (AttributeError, NotImplementedError):  # it is new, or has no storage
                        template = None
                        break
                    if handle._cache is not cache or handle.copied:
                        template = None
                        break
                    values.append(handle._value)
                    template.append(
                        (each.dtype, each.storage_offset(), each.shape, each.stride(), each.is_conj(), each.is_neg())
                    )
                elif cls in _CONSTANTS:
                    template.append(each)
                else:
                    template = None
                    break
        if template is not None:
            call = Call(func, tuple(template), None, (args, None), False)
            arguments = tuple(values)
        else:
            packed = self._packed(rule, args, kwargs)
            if packed is None:
                return self._other(func, rule, args, kwargs)
            call = Call(func, *packed[1:])
            arguments = tuple(packed[0])
        frame = _getframe(1)
        caller = frame.f_back or frame  # a thread of autograd has no other
        operation = Operation(call, arguments, None, arguments, 0, None, caller.f_code, caller.f_lasti)
        try:
            value = self._held(operation, call) if self.alone and template is not None else None
            if value is None:
                value = cache._apply_at_once(operation)
                if value is None:
                    cache._apply(operation)
                    value = operation.outputs[0]
            result, call.result = call.result, None
            storage = call.made
            if storage is not None and value is not None:
                call.made = None
                storage._recompute = Handle(self, value)  # type: ignore[attr-defined]  # ours
                self._known[id(storage)] = value.payload.outer if value.payload is not EVICTED else ref(storage)
            else:
                self._enter_all(new_storages(result), operation.outputs)
        except KeyboardInterrupt:
            cache._interrupted = True
            raise
        finally:
            if cache._dropped or cache._events:
                cache._settle()
        if self.orphans or cache._history > self._history:
            self._tidy()
        return result

    def _writes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """Some arguments are written: if all of these were made here, an operation that takes over their storages."""
        targets: list[Any] = [kwargs.get(each) if isinstance(each, str) else args[each] for each in rule.written]
        hidden = [args[each] for each in rule.hidden] if rule.hidden and rule.hides(args) else []
        packed = None
        if not rule.lists and not hidden and all(self._made_here(each) for each in targets):
            blank = rule.replaced and all(_covers(each) for each in targets) and not _read(targets, args, kwargs)
            packed = self._packed(rule, args, kwargs, targets if blank else ())
        if packed is None:
            self.own([*tensors(targets), *tensors(hidden)])
            outs = [each for each in tensors([kwargs.get(str(name)) for name in rule.written]) if ordinary(each)]
            for each in outs:  # they may be made larger, which only the owner of the bytes can be
                if hasattr(storage_of(each), "_recompute"):
                    self.hand_out(storage_of(each))
            result = self._other(func, rule, args, kwargs, outs)
            if rule.lists:  # torch counts these writes itself, but not below a mode
                torch.autograd.graph.increment_version(list(tensors(targets)))
            return result
        values = packed[0]
        call = Write(func, *packed[1:])
        call.targets = list(dict.fromkeys(storage_of(each) for each in targets))
        call.blank = blank
        handles = [each._recompute for each in call.targets]
        before = [each._value for each in handles]
        call.written = () if blank else tuple([values.index(each) for each in before])
        sizes = [each.nbytes() for each in call.targets]
        if blank:
            for storage in call.targets:
                self.bring(storage)
        try:
            outputs = self._run(call, values, _getframe(1))
        except BaseException:
            self.own(targets)  # what there is now, no repeated run would make
            raise
        if operation := values and outputs[0] and outputs[0].operation:  # a repeated run makes copies
            operation.room = [(each.storage.pool.device, each.storage.size) for each in outputs if each is not None]
        for handle, old, new in zip(handles, before, outputs, strict=False):
            if blank and old.payload is not EVICTED:
                old.payload.outer = None
            handle._value = new
            self.cache._overwritten(old)
        for storage, size in zip(call.targets, sizes, strict=True):
            if size and storage.nbytes() != size:
                self._disown(storage)
        call.targets = [None] * len(handles)
        result, call.result = call.result, None
        self._enter_all(new_storages(result), outputs[len(handles) :])
        return result

    def _views(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs share the storage of an argument, whether its bytes are there or not: nothing to record."""
        return func(*args, **kwargs)

    def _reshapes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """The tensor itself gets another shape, and may get another storage, or a larger one."""
        storages = [
            each if isinstance(each, Storage) else storage_of(each)
            for each in args
            if isinstance(each, (Tensor, Storage))
        ]
        for each in storages:
            self.bring(each)
        if rule.name in ("aten::resize_", "aten::resize_as_"):
            self.forget([args[0]])
        return func(*args, **kwargs)

    def _composes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """It calls other operators, which are our business."""
        with self.watching(self):
            return func.decompose(*args, **kwargs)

    def _other(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], strangers: Sequence[Tensor] = ()) -> Any:
        """It makes nothing that could be made again: it runs while its arguments stay."""
        values: list[Value] = []
        for each in tensors([*args, *kwargs.values()]):
            if any(each is other for other in strangers):
                continue
            handle = self._handle(each)
            if handle is not None:
                values.append(handle._value)
        look = Look(func, (args, kwargs))
        for done in self._run(look, values, _getframe(1)):
            if done is not None:
                self.cache._drop(done)
        if any(not ordinary(each) for each in tensors(look.result)):  # a sparse tensor keeps what it was made of
            for each in tensors([*args, *kwargs.values()]):
                if ordinary(each) and hasattr(storage_of(each), "_recompute"):
                    self.hand_out(storage_of(each))
        return look.result

    # Operations

    def _run(self, function: Any, values: list[Value], frame: FrameType) -> tuple[Value | None, ...]:
        cache = self.cache
        caller = frame.f_back or frame
        packed = tuple(values)
        operation = Operation(function, packed, None, packed, 0, None, caller.f_code, caller.f_lasti)
        try:
            if cache._apply_at_once(operation) is None:
                cache._apply(operation)
            return operation.outputs
        except KeyboardInterrupt:
            cache._interrupted = True
            raise
        finally:
            if cache._dropped or cache._events:
                cache._settle()

    def _held(self, operation: Operation, call: Call) -> Value | None:
        live = call.live
        try:
            return self.cache._apply_held(operation)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            call.live = live  # once more, without the lock: then the cache can make room
            return None

    def _enter_all(self, storages: list[Storage], outputs: Sequence[Value | None]) -> None:
        """What an operation made belongs to its outputs from now on; outputs without a storage are dropped."""
        for storage, value in zip(storages, outputs, strict=False):
            assert value is not None
            self._enter(storage, value)
        for value in outputs[len(storages) :]:
            if value is not None:
                self.cache._drop(value)
        if self.orphans or self.cache._history > self._history:
            self._tidy()

    def _packed(
        self, rule: Rule, args: Any, kwargs: dict[str, Any], blank: Sequence[Tensor] = ()
    ) -> tuple[list[Value], list[Any], dict[str, Any], Any, bool] | None:
        """Values, and what makes a `Call` of the arguments; None if one of the tensors has no storage to evict."""
        if rule.hidden and rule.hides(args):
            blank = [args[each] for each in rule.hidden if args[each] is not None]
            self.own(blank)
        values: list[Value] = []
        try:
            template = [self._argument(each, values, blank) for each in args]
            named = {name: self._argument(each, values, blank) for name, each in kwargs.items()}
        except NotImplementedError:
            return None
        return values, template, named, (args, kwargs), rule.seeded

    def _argument(self, argument: Any, values: list[Value], blank: Sequence[Tensor]) -> Any:
        if isinstance(argument, Tensor):
            if not ordinary(argument):
                raise NotImplementedError
            handle = self._handle(argument)
            if handle is None and storage_of(argument).nbytes():  # it is too large to be copied
                raise NotImplementedError
            if handle is None or any(argument is each for each in blank):
                return Blank(argument, 0 if handle is None else handle._value.storage.size)
            values.append(handle._value)
            return geometry_of(argument)
        if type(argument) is list:
            return [self._argument(each, values, blank) for each in argument]
        return argument

    # Storages

    def _enter(self, storage: Storage, value: Value, copied: bool = False) -> Any:
        handle = storage._recompute = Handle(self, value, copied)  # type: ignore[attr-defined]  # ours
        self._known[id(storage)] = ref(storage)
        return handle

    def _source(self, storage: Storage, others: bool = False) -> Any:
        with self._meeting:
            other = getattr(storage, "_recompute", None)
            if other is not None:
                if other._cache is self.cache:  # another thread has met it just now
                    return other
                raise RuntimeError(
                    "a tensor belongs to another budget block that is still open; let all threads that share tensors "
                    "enter one block: with block: ..."
                )
            if others:
                return self._enter(storage, self.cache._add_source(new_memory(copy(storage))), copied=True)
            memory = Memory(device_name(storage.device), storage.nbytes(), ref(storage), None)
            memory.keep()
            try:
                return self._enter(storage, self.cache._add_source(memory))
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
        if handle is not None and handle.copied and not same(handle._value.payload.storage, storage):
            handle = None  # somebody has written to it: it is another value now
            del storage._recompute  # type: ignore[attr-defined]  # ours
        if handle is None or handle._cache is not self.cache:
            others = foreign(storage) and not isinstance(tensor, Parameter)  # a model is changed by operators alone
            if not storage.nbytes() or (others and storage.nbytes() > _COPIED):
                return None
            return self._source(storage, others)
        return handle

    def _made_here(self, tensor: Any) -> bool:
        """Whether an operation has made what a tensor holds."""
        if not isinstance(tensor, Tensor):
            return False
        handle = self._handle(tensor)
        return handle is not None and handle._value.operation is not None

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
            if handle is None or handle.copied:
                continue
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
        errors: list[BaseException] = []
        for storage in self.known():
            value = storage._recompute._value  # type: ignore[attr-defined]  # ours
            try:
                if value.operation is not None:
                    self._fix(value)
                value.payload.give_back()
                del storage._recompute  # type: ignore[attr-defined]  # ours
            except Exception as error:
                errors.append(error)
        self._known.clear()
        if errors:
            raise errors[0]


def _lock(value: Value) -> None:
    value.storage.pool.lock(value.storage)


def _nothing(value: Value) -> None:
    """What is done with a value that is only to be in memory."""


def _read(targets: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor that is written stands among the arguments once more."""
    found = [storage_of(each) for each in tensors([*args, *kwargs.values()]) if ordinary(each)]
    return any(found.count(storage_of(each)) > 1 for each in targets)


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is all there is of its storage, each byte once."""
    handle = storage_of(tensor)._recompute  # type: ignore[attr-defined]  # ours
    return bool(
        tensor.numel() * tensor.element_size() == handle._value.storage.size
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )
