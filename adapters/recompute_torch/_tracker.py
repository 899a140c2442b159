"""What happens to each operator call inside a block: it is recorded, or its arguments stay while it looks at them.

An operator that makes tensors is an operation; one that writes to a tensor that an operation has made is one too, whose
output takes over the storage. What writes to sources, looks at values or cannot be repeated just runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from sys import _getframe
from types import FrameType
from typing import Any, Final
from weakref import ref

import torch

import recompute as rc
from recompute._engine.graph import EVICTED, Operation, Value
from recompute_torch._memory import Storage, storage_of
from recompute_torch._recipe import Blank, Call, Look, Write, geometry_of, new_storages, ordinary, tensors
from recompute_torch._rules import Rule, rule_of
from recompute_torch._shortage import out_of_memory
from recompute_torch._storages import Handle, Storages

Tensor = torch.Tensor

Parameter = torch.nn.Parameter

_CONSTANTS: Final = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class Tracker(Storages):
    """What a mode does with the calls that it sees."""

    def __init__(
        self,
        cache: rc.Cache,
        history: int,
        everything: bool,
        watching: Callable[[Tracker], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(cache, history)
        self.alone = True  # one thread is in the block: operators may run while the cache is locked
        self.watching: Final = watching  # makes the mode that brings calls here
        self.rules: dict[int, tuple[Callable[..., Any], Rule]] = {}  # by the identity of an operator
        self._everything = everything
        self._funcs: list[Any] = []  # the operators, which must live as long as their identities are used

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
        cache = self.cache
        simple = self._simple(args) if rule.plain and not kwargs else None
        if simple is not None:
            call = Call(func, simple[0], None, (args, None), False)
            arguments = simple[1]
        else:
            packed = self._packed(rule, args, kwargs)
            if packed is None:
                return self._other(func, rule, args, kwargs)
            call = Call(func, *packed[1:])
            arguments = tuple(packed[0])
        frame = _getframe(1)
        caller = frame.f_back or frame  # a thread of autograd has no other
        operation = Operation(call, arguments, None, arguments, 0, None, caller.f_code, caller.f_lasti)
        with cache._settling:
            value = self._held(operation, call) if self.alone and simple is not None else None
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
                self._kept_by(result, args, kwargs)
        if self.orphans or cache._history > self._history:
            self._tidy()
        return result

    def _writes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """Some arguments are written: if all of these were made here, an operation that takes over their storages."""
        if rule.self_only:
            if self._free_source(args[0]):  # mostly a parameter, or what an optimizer remembers
                return self._other(func, rule, args, kwargs)
            simple = None if kwargs or rule.replaced or rule.seeded else self._simple(args)
            if simple is not None and simple[1][0].operation is not None:
                write = Write(func, simple[0], None, (args, {}), False)
                return self._takes_over(write, simple[1], [storage_of(args[0])], False)
        targets: list[Any] = [kwargs.get(each) if isinstance(each, str) else args[each] for each in rule.written]
        hidden = [args[each] for each in rule.hidden] if rule.hidden and rule.hides(args) else []
        if not rule.lists and not hidden and all(self._made_here(each) for each in targets):
            blank = rule.replaced and all(_covers(each) for each in targets) and not _read(targets, args, kwargs)
            first = any(
                self._unwritten(self._handle(each)) for each in targets
            )  # what was there, nobody can make again
            packed = self._packed(rule, args, kwargs, targets if blank else ()) if blank or not first else None
            if packed is not None:
                storages = list(dict.fromkeys(storage_of(each) for each in targets))
                return self._takes_over(Write(func, *packed[1:]), packed[0], storages, blank)
        self.own([*tensors(targets), *tensors(hidden)])
        outs = [each for each in tensors([kwargs.get(str(name)) for name in rule.written]) if ordinary(each)]
        for each in outs:  # they may be made larger, which only the owner of the bytes can be
            self.hand_out(storage_of(each))
        result = self._other(func, rule, args, kwargs, outs)
        if rule.lists:  # torch counts these writes itself, but not below a mode
            torch.autograd.graph.increment_version(list(tensors(targets)))
        return result

    def _takes_over(self, call: Write, values: Sequence[Value], targets: list[Any], blank: bool) -> Any:
        """Run a call whose first outputs are what the targets hold from then on."""
        call.targets, call.blank = targets, blank
        sizes = [each.nbytes() for each in targets]
        before = [each._recompute._value for each in targets]
        call.written = () if blank else tuple([values.index(each) for each in before])
        if blank:  # what they hold is not asked for; the bytes are needed, and counted for the new value
            for storage, value in zip(targets, before, strict=True):
                if value.operation is None:
                    self.hand_out(storage)
                else:
                    self.bring(storage)
                    self._disown(storage)
        try:
            outputs = self._run(call, values, _getframe(2))
        except BaseException:
            if call.live is None and not blank:  # it has begun: what there is now, no repeated run would make
                for storage in targets:
                    self._disown(storage)
            raise
        for storage, old, new in zip(targets, before, outputs, strict=False):
            assert new is not None
            if blank:
                self._enter(storage, new)
            else:
                storage._recompute._value = new
                self.cache._overwritten(old)
        if not blank and (first := outputs[0]) is not None and first.operation is not None:
            sizes_again = [(each.storage.pool.device, each.storage.size) for each in outputs if each is not None]
            first.operation.room = sizes_again  # a repeated run writes to copies
        for storage, size in zip(targets, sizes, strict=True):
            if storage.nbytes() != size:
                self._disown(storage)
        call.targets = [None] * len(targets)
        result, call.result = call.result, None
        self._enter_all(new_storages(result), outputs[len(targets) :])
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

    def _buffers(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """A buffer that somebody will write to, maybe by its address: a source, until an operator writes all of it."""
        result = func(*args, **kwargs)
        for storage in new_storages(result):
            self._source(storage, "unwritten")
        return result

    def _composes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """It calls other operators, which are our business."""
        with self.watching(self):
            return func.decompose(*args, **kwargs)

    def _other(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any], strangers: Sequence[Tensor] = ()) -> Any:
        """It makes nothing that could be made again: it runs while its arguments stay."""
        values: list[Value] = []
        for argument in (*args, *kwargs.values()) if kwargs else args:
            for each in (argument,) if isinstance(argument, Tensor) else tensors(argument):
                if strangers and any(each is other for other in strangers):
                    continue
                handle = self._handle(each)
                if handle is not None:
                    values.append(handle._value)
        look = Look(func, (args, kwargs))
        for done in self._run(look, values, _getframe(1)):
            if done is not None:
                self._drop(done)
        self._kept_by(look.result, args, kwargs)
        return look.result

    def _kept_by(self, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A sparse tensor or the like has the storages of what it was made of: their bytes must stay."""
        if any(not ordinary(each) for each in tensors(result)):
            for each in tensors([*args, *kwargs.values()]):
                if ordinary(each):
                    self.hand_out(storage_of(each))

    # Operations

    def _run(self, function: Any, values: Sequence[Value], frame: FrameType) -> tuple[Value | None, ...]:
        cache = self.cache
        caller = frame.f_back or frame
        packed = tuple(values)
        operation = Operation(function, packed, None, packed, 0, None, caller.f_code, caller.f_lasti)
        with cache._settling:
            if cache._apply_at_once(operation) is None:
                cache._apply(operation)
            return operation.outputs

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
                self._drop(value)
        if self.orphans or self.cache._history > self._history:
            self._tidy()

    def _simple(self, args: Any) -> tuple[tuple[Any, ...], tuple[Value, ...]] | None:
        """The arguments as a `Call` has them, and their values, if they are known tensors and constants; else None.

        Written out, because nearly every call comes by: benchmarks/torch_overhead.py.
        """
        cache = self.cache
        values: list[Value] = []
        template: list[Any] = []
        for each in args:
            cls = type(each)
            if cls is Tensor or cls is Parameter:
                try:
                    handle = storage_of(each)._recompute  # type: ignore[attr-defined]  # ours
                except (AttributeError, NotImplementedError):  # it is new, or has no storage
                    return None
                if handle._cache is not cache or handle.special:
                    return None
                values.append(handle._value)
                template.append(
                    (each.dtype, each.storage_offset(), each.shape, each.stride(), each.is_conj(), each.is_neg())
                )
            elif cls in _CONSTANTS:
                template.append(each)
            else:
                return None
        return tuple(template), tuple(values)

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
                return Blank(argument, storage_of(argument).nbytes())
            values.append(handle._value)
            return geometry_of(argument)
        if type(argument) is list:
            return [self._argument(each, values, blank) for each in argument]
        return argument


def _read(targets: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor that is written stands among the arguments once more."""
    found = [storage_of(each) for each in tensors([*args, *kwargs.values()]) if ordinary(each)]
    return any(found.count(storage_of(each)) > 1 for each in targets)


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is all there is of its storage, each byte once."""
    size = tensor.numel() * tensor.element_size()
    return bool(size and size == storage_of(tensor).nbytes() and torch.ops.aten.is_non_overlapping_and_dense(tensor))
