"""What happens to each operator call inside a block: it is recorded, or its arguments stay while it looks at them.

An operator that makes tensors is an operation; one that writes to a tensor that an operation has made is one too, whose
output takes over the storage. What writes to sources, looks at values or cannot be repeated just runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import Any, Final

import torch

import recompute as rc
from recompute.extend import Value, node_of
from recompute_torch._holders import Floor
from recompute_torch._memory import Lost, Storage, device_name, storage_below_modes, storage_of, with_room
from recompute_torch._recipe import Blank, Call, Look, Write, geometry_of, immaterial, new_storages, ordinary, tensors
from recompute_torch._rules import STREAMS, Rule, rule_of
from recompute_torch._storages import Handle, Storages

Tensor = torch.Tensor

Parameter = torch.nn.Parameter

_CONSTANTS: Final = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


_BETWEEN: Final = ("torch.", "recompute.", "recompute_torch.", "contextlib.")
"""Packages between an operator and the line of the program that called it."""


def _program_at(frame: FrameType) -> FrameType:
    """The innermost frame of the program; a thread of autograd has none, and names the operator's."""
    outer: FrameType | None = frame
    while outer is not None and f"{outer.f_globals.get('__name__')}.".startswith(_BETWEEN):
        outer = outer.f_back
    return outer or frame.f_back or frame


class Tracker(Storages):
    """What a mode does with the calls that it sees."""

    def __init__(
        self,
        cache: rc.Cache,
        history: int,
        *,
        everything: bool,
        watching: Callable[[Tracker], AbstractContextManager[Any]],
        moves: bool = False,
        verifies: bool = False,
    ) -> None:
        super().__init__(cache, history, moves=moves, verifies=verifies)
        self.watching: Final = watching  # makes the mode that brings calls here
        self.rules: dict[int, tuple[Callable[..., Any], Rule]] = {}  # by the identity of an operator
        self.floor: Floor | None = None  # told of each operation, if that is asked for
        self._everything = everything
        self._is_short = False  # something has been evicted
        self._funcs: list[Any] = []  # the operators, which must live as long as their identities are used

    def floor_now(self) -> Floor:
        """The floor so far, or one that knows what stays now."""
        return self.floor or Floor(self.holders, self.known)

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
            for tensor in tensors([*args, *kwargs.values()]):
                if tensor.layout is torch.strided and hasattr(storage_of(tensor), "_recompute"):
                    return method(func, rule, args, kwargs)
            return func(*args, **kwargs)

        return call

    # The kinds of calls

    def _makes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """All outputs are new: an operation."""
        if self.stepping and rule.pointwise and self._passing(args, kwargs):
            result = with_room(func, args, kwargs, cache=self.cache)
            self.cache.extend.count_operation()
            self._count(result)
            return result
        simple = self._simple(args) if rule.plain and not kwargs else None
        if simple is not None:
            call = Call(func, rule, simple[0], None, (args, None))
            nodes: Sequence[Value] = simple[1]
        else:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "meta":  # only what the outputs would look like
                return func(*args, **kwargs)
            advanced = rule.advanced(args)
            packed = None if advanced or rule.once else self._packed(rule, args, kwargs)
            if packed is None:
                self.own(advanced)
                self.hold(advanced)
                result = self._other(func, rule, args, kwargs, written=advanced)
                for made in new_storages(result):
                    self._source(made)
                return result
            call = Call(func, rule, *packed[1:])
            nodes = tuple(packed[0])
        handles = self._run(call, nodes, _getframe(1), single=rule.single)
        result, call.result = call.result, None
        plain = call.made
        if plain is not None:
            call.made = None
            self._enter_all(plain, handles)
        else:
            self._enter_all(new_storages(result), handles)
            self._kept_by(result, args, kwargs)
        if self.orphans or self.cache.extend.history > self._history:
            self._tidy()
        return result

    def _writes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """Some arguments are written: if all of these were made here, an operation that takes over their storages."""
        if rule.self_only:
            if self._free_source(args[0]):  # mostly a parameter, or what an optimizer remembers
                if rule.own and self._stay(args) and (not kwargs or self._stay(kwargs.values())):
                    self.cache.extend.count_operation()
                    return func(*args, **kwargs)
                return self._other(func, rule, args, kwargs, written=args[:1])
            simple = None if kwargs or rule.replaced or rule.seeded else self._simple(args)
            if simple is not None and simple[1][0].operation is not None:
                write = Write(func, rule, simple[0], None, (args, {}))
                return self._takes_over(write, simple[1], [storage_of(args[0])], blank=False, single=rule.single)
        targets: list[Any] = [
            kwargs.get(position) if isinstance(position, str) else args[position] for position in rule.written
        ]
        hidden = [args[position] for position in rule.hidden] if rule.hidden and rule.hides(args) else []
        if not rule.lists and not hidden and all(self._made_here(tensor) for tensor in targets):
            blank = rule.replaced and all(_covers(tensor) for tensor in targets) and not _read(targets, args, kwargs)
            first = any(
                self._unwritten(self._handle(tensor)) for tensor in targets
            )  # what was there cannot be made again
            packed = self._packed(rule, args, kwargs, targets if blank else ()) if blank or not first else None
            if packed is not None:
                storages = list(dict.fromkeys(storage_of(tensor) for tensor in targets))
                return self._takes_over(
                    Write(func, rule, *packed[1:]), packed[0], storages, blank=blank, single=rule.single
                )
        written = [*tensors(targets), *tensors(hidden)]
        self.own(written)
        outs = [tensor for tensor in tensors([kwargs.get(str(name)) for name in rule.written]) if ordinary(tensor)]
        for tensor in outs:  # they may be made larger, which only the owner of the bytes can be
            self.hand_out(storage_of(tensor))
        result = self._other(func, rule, args, kwargs, outs, written)
        if rule.lists:  # torch counts these writes itself, but not below a mode
            torch.autograd.graph.increment_version(list(tensors(targets)))
        return result

    def _takes_over(self, call: Write, nodes: Sequence[Value], targets: list[Any], *, blank: bool, single: bool) -> Any:
        """Run a call whose first outputs are what the targets hold from then on."""
        call.targets, call.blank, call.single, call.written = targets, blank, single, ()
        sizes = [target.nbytes() for target in targets]
        before: list[Handle] = []
        if blank:  # what they hold is not asked for; the bytes are needed, and counted for the new value
            for target in targets:
                node = node_of(target._recompute)
                if node.operation is None:
                    self.hand_out(target)
                else:
                    with self.staying(node):
                        self._disown(target)
        else:
            before = [target._recompute for target in targets]
            call.written = tuple([nodes.index(node_of(handle)) for handle in before])
        try:
            handles = self._run(call, nodes, _getframe(2), single=single)
        except BaseException:
            if call.live is None and not blank:  # it has begun: what there is now, no repeated run would make
                for target in targets:
                    self._disown(target)
            raise
        if not single and not blank:
            made = [node_of(handle).storage for handle in handles]
            copies = [(storage.pool.device, storage.size) for storage in made]  # it copies all targets
            self.cache.extend.set_room(node_of(handles[0]), copies)
        for number, target in enumerate(targets):
            if blank:
                self._enter(target, handles[number])
            elif getattr(target, "_recompute", None) is (old := before[number]) and node_of(old).operation is not None:
                self.cache.extend.overwrite(old, by=handles[number])
        for target, size in zip(targets, sizes, strict=True):
            if target.nbytes() != size:
                self._disown(target)
        call.targets = [None] * len(targets)
        result, call.result = call.result, None
        if not single:
            self._enter_all(new_storages(result), handles[len(targets) :])
        if self.orphans or self.cache.extend.history > self._history:
            self._tidy()
        return result

    def _views(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """The outputs share the storage of an argument, whether its bytes are there or not: nothing to record."""
        return func(*args, **kwargs)

    def _reshapes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """The tensor itself gets another shape, and may get another storage, or a larger one."""
        storages = [
            argument if isinstance(argument, Storage) else storage_of(argument)
            for argument in args
            if isinstance(argument, (Tensor, Storage))
        ]
        for storage in storages:
            handle: Handle | None = getattr(storage, "_recompute", None)
            if handle is not None and not handle.resident:  # bring its bytes back
                with handle.tracker.staying(node_of(handle)):
                    pass
        if rule.name in ("aten::resize_", "aten::resize_as_"):
            self.forget([args[0]])
        return func(*args, **kwargs)

    def _buffers(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """A buffer that will be written to, maybe by its address: a source, until an operator writes all of it."""
        result = with_room(func, args, kwargs, cache=self.cache)
        for storage in new_storages(result):
            handle = self._source(storage, "unwritten")
            if self._moves and "empty" not in rule.name:  # an optimizer begins with zeros
                self.cache.extend.detach(node_of(handle), moves=True)
        return result

    def _composes(self, func: Any, rule: Rule, args: Any, kwargs: dict[str, Any]) -> Any:
        """It calls other operators, which are our business; nested tensors may have a kernel of their own for it."""
        if any(tensor.is_nested for tensor in tensors([*args, *kwargs.values()])):
            return self._other(func, rule, args, kwargs)
        with self.watching(self):
            return func.decompose(*args, **kwargs)

    def _other(
        self,
        func: Any,
        rule: Rule,
        args: Any,
        kwargs: dict[str, Any],
        strangers: Sequence[Tensor] = (),
        written: Sequence[Tensor] = (),
    ) -> Any:
        """It makes nothing that could be made again: it runs while its arguments stay."""
        if rule.own and not strangers and self._stay(args) and (not kwargs or self._stay(kwargs.values())):
            result = func(*args, **kwargs)
            self.cache.extend.count_operation()
            self._kept_by(result, args, kwargs)
            return result
        nodes: list[Value] = []
        for argument in (*args, *kwargs.values()) if kwargs else args:
            for tensor in (argument,) if isinstance(argument, Tensor) else tensors(argument):
                if strangers and any(tensor is other for other in strangers):
                    continue
                handle = self._handle(tensor)
                if handle is not None:
                    nodes.append(node_of(handle))
        before = partial(self.give_back, nodes) if rule.name == STREAMS else partial(self.wrote, written)
        look = Look(func, (args, kwargs), before, writes=bool(written))
        self._run(look, nodes, _getframe(1), single=True)
        self._kept_by(look.result, args, kwargs)
        return look.result

    def _passing(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a step of an optimizer makes something for the moment, out of what stays.

        It is counted, as long as half of the memory that the step has found free is left, and not remembered.
        """
        if get_ident() not in self.stepping or torch.is_grad_enabled():
            return False
        if not self._stay(args) or (kwargs and not self._stay(kwargs.values())):
            return False
        given = next((argument for argument in args if isinstance(argument, Tensor)), None)
        if given is None:
            return False
        device = device_name(given.device)
        return self.cache.extend.room(device) - given.nbytes >= self.spare.get(device, 0.0)

    def _stay(self, given: Iterable[Any]) -> bool:
        """Whether all tensors among these stay in memory anyway, so that nothing is to be done while they are used."""
        if self._verifies:  # writes must be told of
            return False
        for argument in given:
            if isinstance(argument, Tensor):
                try:
                    storage = storage_below_modes(argument)
                except NotImplementedError:  # it has no storage
                    return False
                handle = getattr(storage, "_recompute", None)
                if handle is None:  # it is new
                    if not hasattr(storage, "_passing"):
                        return False
                elif handle.special or handle.tracker is not self or not node_of(handle).stays:
                    return False
            elif type(argument) is list and not self._stay(argument):
                return False
        return True

    def _kept_by(self, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A sparse tensor or the like has the storages of what it was made of: their bytes must stay."""
        if any(not ordinary(tensor) and not immaterial(tensor) for tensor in tensors(result)):
            for tensor in tensors([*args, *kwargs.values()]):
                if ordinary(tensor):
                    self.hand_out(storage_of(tensor))

    # Operations

    def _run(self, function: Call | Look, nodes: Sequence[Value], frame: FrameType, *, single: bool) -> list[Handle]:
        """Let the cache run a call; what refers to its outputs. `frame` is the one below the methods of this class."""
        caller = _program_at(frame)
        if self.cache.extend.was_short:
            if not self._is_short:
                self._is_short = True
                self.keep_all()
            if isinstance(function, Call):
                function.keeps = True
        while True:
            try:
                handles = self.cache.extend.run(function, nodes, nodes, caller, nout=1 if single else 0, handle=Handle)
                break
            except Lost:
                if function.live is None:  # it has begun
                    raise
        if self._lent:
            self._take_back()
        if self.floor is not None:
            self.floor.note(function, nodes, [node_of(handle) for handle in handles])
        return handles

    def _enter_all(self, storages: list[Storage], handles: Sequence[Handle]) -> None:
        """What an operation made belongs to its outputs; outputs without a storage go."""
        for storage, handle in zip(storages, handles, strict=False):
            self._enter(storage, handle)

    def _simple(self, args: Any) -> tuple[tuple[Any, ...], tuple[Value, ...]] | None:
        """The arguments as a `Call` has them, and their nodes, if they are known tensors and constants; else None.

        Written out, because nearly every call comes by: benchmarks/torch_overhead.py.
        """
        nodes: list[Value] = []
        template: list[Any] = []
        for argument in args:
            cls = type(argument)
            if cls is Tensor or cls is Parameter:
                try:
                    handle = storage_below_modes(argument)._recompute  # type: ignore[attr-defined]  # ours
                    elements = argument.dtype, argument.shape, argument.stride()
                except (AttributeError, RuntimeError):  # it is new, has no storage, or is nested
                    return None
                if handle.tracker is not self or handle.special:
                    return None
                nodes.append(node_of(handle))
                template.append((elements, argument.storage_offset(), argument.is_conj(), argument.is_neg()))
            elif cls in _CONSTANTS:
                template.append(argument)
            else:
                return None
        return tuple(template), tuple(nodes)

    def _packed(
        self, rule: Rule, args: Any, kwargs: dict[str, Any], blank: Sequence[Tensor] = ()
    ) -> tuple[list[Value], list[Any], dict[str, Any], Any] | None:
        """Nodes, and what makes a `Call` of the arguments; None if one of the tensors has no storage to evict."""
        if rule.hidden and rule.hides(args):
            blank = [args[position] for position in rule.hidden if args[position] is not None]
            self.own(blank)
            self.hold(blank)
            self.wrote(blank)
        nodes: list[Value] = []
        try:
            template = [self._argument(argument, nodes, blank) for argument in args]
            named = {name: self._argument(argument, nodes, blank) for name, argument in kwargs.items()}
        except NotImplementedError:
            return None
        return nodes, template, named, (args, kwargs)

    def _argument(self, argument: Any, nodes: list[Value], blank: Sequence[Tensor]) -> Any:
        if isinstance(argument, Tensor):
            if not ordinary(argument):
                raise NotImplementedError
            handle = self._handle(argument)
            if handle is None and storage_of(argument).nbytes():  # it is too large to be copied
                raise NotImplementedError
            if handle is None or any(argument is other for other in blank):
                return Blank(geometry_of(argument), argument.device, storage_of(argument).nbytes())
            nodes.append(node_of(handle))
            return geometry_of(argument)
        if type(argument) is list:
            return [self._argument(part, nodes, blank) for part in argument]
        return argument


def _read(targets: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a tensor that is written stands among the arguments once more."""
    taken = [storage_of(tensor) for tensor in tensors([*args, *kwargs.values()]) if ordinary(tensor)]
    return any(taken.count(storage_of(tensor)) > 1 for tensor in targets)


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is all there is of its storage, each byte once."""
    size = tensor.numel() * tensor.element_size()
    return bool(size and size == storage_of(tensor).nbytes() and torch.ops.aten.is_non_overlapping_and_dense(tensor))
