"""How one operator call is run again: the overload, its arguments without their memory, and what it wrote.

Where a tensor stood there is its geometry, which becomes a tensor again on the memory that the cache hands in. A call
that wrote to a tensor writes to a copy of it when it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch

from recompute import extend
from recompute.extend import Outputs
from recompute_torch._memory import (
    Memory,
    Storage,
    copy,
    device_name,
    empty,
    new_memory,
    quietly,
    storage_below_modes,
    storage_of,
    with_room,
)
from recompute_torch._random import States, replaying, states, turn
from recompute_torch._rules import Rule

Tensor = torch.Tensor

_NUMBER_BYTES: Final = 16  # bytes
_TINY_BYTES: Final = 1024  # bytes
_LENGTHS_BYTES: Final = 2**14  # bytes: of 2,048 steps
_NUMBERS: Final = frozenset({int, float, bool, complex})

Geometry = tuple[tuple[torch.dtype, torch.Size, tuple[int, ...]], int, bool, bool]
"""(dtype, shape, strides), storage offset, conjugated, negated. No argument of an operator is a tuple otherwise."""


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for a tensor whose content did not matter: it was overwritten, or has no bytes."""

    geometry: Geometry
    device: torch.device
    nbytes: int


class Call:
    """An operator call on tensors of the program that made new ones. As a function of memory it can be run again."""

    __slots__ = ("args", "dtype", "func", "grad", "keeps", "kwargs", "live", "made", "result", "rule", "states")

    sizes_alone = True
    """`size_key` says all that decides the sizes of the outputs, those of the arguments included."""
    keeps_states = True
    """It saves and restores the states of generators itself."""

    def __init__(
        self,
        func: Callable[..., Any],
        rule: Rule,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        live: Any,
    ) -> None:
        self.func = func
        self.rule = rule
        self.args = args  # a geometry instead of each tensor that has memory, also inside of lists
        self.kwargs = kwargs
        self.states: States = ()  # that generators were in, if it draws from these
        self.grad = torch.is_grad_enabled()  # some kernels make more when it is
        self.dtype = torch.get_default_dtype()  # that of a quotient of integers
        self.keeps = False  # memory is short: its results may be needed when the program needs them no more
        self.live: Any = live  # the arguments themselves and those by name, for the first run
        self.result: Any = None  # of the first run, for the program
        self.made: list[Storage] | None = None  # new ones, by the first run, if all that it made is plain

    def __call__(self, *memories: Memory) -> Any:
        """The memory of each output."""
        live, self.live = self.live, None
        if live is None:
            return _given(self.again(memories, {}))
        args, kwargs = live
        outputs = self._first(args, kwargs or {})
        return outputs if not self.keeps else _kept(outputs)

    def _first(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.rule.seeded:
            return self._first_draw(args, kwargs)
        self.result = result = with_room(self.func, args, kwargs)
        if type(result) is Tensor:  # mostly it is one new tensor
            made: list[Storage] = []
            memory = _plain(result, made)
            if memory is not None:
                self.made = made
                return memory
        elif type(result) is tuple:
            made = []
            several = [_plain(part, made) for part in result if part is not None]
            if several and None not in several:
                self.made = made
                return Outputs(several)
        return _given(new_memories(result))

    def _first_draw(self, args: Any, kwargs: dict[str, Any]) -> Any:
        with turn:
            self.states = states(args, kwargs)
            self.result = result = with_room(self.func, args, kwargs, again=self._draw_again)
        return _given(new_memories(result))

    def _draw_again(self, *args: Any, **kwargs: Any) -> Any:
        for generator, state in self.states:
            generator.set_state(state)
        return self.func(*args, **kwargs)

    def again(self, memories: tuple[Memory, ...], copies: dict[int, Storage]) -> list[Memory]:
        """The memory of new outputs; `copies` stand in for the memory with these numbers."""
        return quietly(lambda: self._again(memories, copies))

    def _again(self, memories: tuple[Memory, ...], copies: dict[int, Storage]) -> list[Memory]:
        with (
            torch.autograd.grad_mode.set_grad_enabled(self.grad),
            nullcontext() if torch.get_default_dtype() is self.dtype else _default(self.dtype),
            replaying(self.states) if self.states else nullcontext(),
        ):
            own = [copies.get(number) or memory.storage for number, memory in enumerate(memories)]
            used: list[Storage] = []
            given = iter(own)
            args = [_filled(argument, given, used) for argument in self.args]
            kwargs = {name: _filled(argument, given, used) for name, argument in (self.kwargs or {}).items()}
            # With copies it may have written when it fails.
            result = self.func(*args, **kwargs) if copies else with_room(self.func, args, kwargs)
            used += own
            new = [storage for storage in storages(result) if storage not in used]
            return [*self.wrote(copies, used), *map(new_memory, new)]

    def wrote(self, copies: dict[int, Storage], used: list[Storage]) -> list[Memory]:
        """The memory of what a repeated run wrote to."""
        return []

    def size_key(self) -> Hashable:
        """What decides the sizes of the outputs. Of a number beside tensors it is the type."""
        numbers, kwargs = self.rule.numbers, list((self.kwargs or {}).values())
        parts = [
            type(argument) if position in numbers and type(argument) in _NUMBERS else _constant(argument)
            for position, argument in enumerate(self.args)
        ]
        return (self.func, *parts, _constant(kwargs))

    def expect(self, device: str) -> list[tuple[str, int]]:
        """(device, bytes) of the outputs, as torch reckons them without content; empty if it cannot say."""
        try:
            return quietly(lambda: self._expect(device))
        except Exception as error:  # not all operators can
            if extend.is_interrupt(error):
                raise
            return []

    def _expect(self, device: str) -> list[tuple[str, int]]:
        args = [_without_content(argument) for argument in self.args]
        kwargs = {name: _without_content(argument) for name, argument in (self.kwargs or {}).items()}
        if kwargs.get("device") is not None:
            device, kwargs["device"] = device_name(kwargs["device"]), torch.device("meta")
        given = {storage_of(tensor) for tensor in tensors([*args, *kwargs.values()])}
        made = {storage_of(tensor): tensor for tensor in tensors(self.func(*args, **kwargs))}
        sizes = [
            0 if tiny(tensor, storage.nbytes()) else storage.nbytes()
            for storage, tensor in made.items()
            if storage not in given
        ]
        return [(device, size) for size in sizes if size]

    @property
    def __name__(self) -> str:
        return str(self.func)

    def __repr__(self) -> str:
        return f"<call of {self.func}>"


class Write(Call):
    """A call that wrote to tensors which operations had made. Its first outputs are what they hold from then on."""

    __slots__ = ("blank", "single", "targets", "written")

    single: bool  # it makes nothing but what it writes
    written: tuple[int, ...]  # numbers of the arguments that it wrote
    blank: bool  # instead: the targets are blanks
    targets: list[Any]  # the storages that the first run writes

    def __call__(self, *memories: Memory) -> Any:
        live, self.live = self.live, None
        if live is None:
            return _given(self.again(memories, self._copies(memories)))
        args, kwargs = live
        with turn if self.rule.seeded else nullcontext():
            if self.rule.seeded:
                self.states = states(args, kwargs)
            self.result = result = self.func(*args, **kwargs)
        if self.blank:
            outputs = [Memory(device_name(made.device), made.nbytes(), ref(made), None) for made in self.targets]
        else:
            outputs = list(dict.fromkeys([memories[number] for number in self.written]))
        made = outputs[0] if self.single else _given(outputs + new_memories(result, self.targets))
        return made if not self.keeps else _kept(made)

    def _copies(self, memories: tuple[Memory, ...]) -> dict[int, Storage]:
        """A copy of each memory that is written, wherever it stands among the arguments."""
        copies: dict[Memory, Storage] = {memories[number]: copy(memories[number].storage) for number in self.written}
        return {number: copies[memory] for number, memory in enumerate(memories) if memory in copies}

    def wrote(self, copies: dict[int, Storage], used: list[Storage]) -> list[Memory]:
        if self.blank:  # blanks come first among what was used, in their order
            return [new_memory(storage) for storage in used if storage.nbytes()][: len(self.targets)]
        return [new_memory(storage) for storage in dict.fromkeys(copies[number] for number in self.written)]


class Look:
    """A call that makes nothing the cache could make again: it runs once, while its arguments stay."""

    __slots__ = ("before", "func", "live", "result", "writes")

    keeps_states = True

    def __init__(
        self, func: Callable[..., Any], live: tuple[Any, dict[str, Any]], before: Callable[[], None], *, writes: bool
    ) -> None:
        self.func = func
        self.writes = writes  # if it fails it may have done so: it does not run again
        self.live: Any = live
        self.result: Any = None
        self.before = before  # called when the arguments are there

    def __call__(self, *memories: Memory) -> None:
        (args, kwargs), self.live = self.live, None
        self.before()
        self.result = self.func(*args, **kwargs) if self.writes else with_room(self.func, args, kwargs)

    def size_key(self) -> Hashable:
        return Look

    @property
    def __name__(self) -> str:
        return str(self.func)


def _plain(result: Any, made: list[Storage]) -> Memory | None:
    """Memory in the storage of a tensor that is new, and no more than that, which is added to `made`; else None."""
    plain = type(result) is Tensor and (result.is_cpu or result.is_cuda)
    if plain and not result.is_nested and not result.is_quantized:
        try:
            storage = storage_below_modes(result)
        except NotImplementedError:  # it has none
            return None
        size = storage.nbytes()
        if size and not hasattr(storage, "_recompute") and storage not in made:
            made.append(storage)
            device = "cpu" if result.is_cpu else device_name(storage.device)
            return Memory(device, size, ref(storage), None, tiny=size <= _LENGTHS_BYTES and tiny(result, size))
    return None


def _kept(outputs: Any) -> Any:
    """The outputs, which stay when the program needs them no more."""
    for memory in (outputs,) if isinstance(outputs, Memory) else outputs or ():
        if not memory.tiny:
            memory.keep()
    return outputs


def _given(outputs: list[Memory]) -> Any:
    return outputs[0] if len(outputs) == 1 else Outputs(outputs) if outputs else None


def _filled(argument: Any, given: Iterator[Storage], used: list[Storage]) -> Any:
    """An argument with tensors again; the memory of blanks is added to `used`."""
    cls = type(argument)
    if cls is tuple:
        return tensor_on(next(given), argument)
    if cls is Blank:
        storage = empty(argument.nbytes, argument.device)
        used.append(storage)
        return tensor_on(storage, argument.geometry)
    if cls is list:
        return [_filled(part, given, used) for part in argument]
    return argument


def _without_content(argument: Any) -> Any:
    """An argument with tensors of torch's device "meta", which have no memory."""
    cls = type(argument)
    if cls is Blank:
        argument = argument.geometry
    if type(argument) is tuple:
        (dtype, shape, strides), *_ = argument
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return [_without_content(part) for part in argument] if cls is list else argument


def geometry_of(tensor: Any) -> Geometry:
    """What a tensor is beyond its memory."""
    return (tensor.dtype, tensor.shape, tensor.stride()), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()


def tensor_on(storage: Storage, geometry: Geometry) -> Tensor:
    """A tensor on given memory."""
    (dtype, shape, strides), offset, conjugated, negated = geometry
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
    if conjugated:
        torch._C._set_conj(tensor, True)
    if negated:
        torch._C._set_neg(tensor, True)
    return tensor


def tensors(result: Any) -> Iterator[Tensor]:
    """The tensors in what an operator takes or returns, or an optimizer remembers."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        yield from tensors(list(result.values()))
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from tensors(part)


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but geometry on a storage."""
    return (
        tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and not immaterial(tensor)
    )


def immaterial(tensor: Tensor) -> bool:
    """Whether a tensor has a size and no memory: those of device "meta", and the zeros of forward-mode derivatives."""
    return tensor.is_meta or tensor._is_zerotensor()


def storages(result: Any) -> list[Storage]:
    """The storages of what an operator returned that have bytes, each once."""
    made: list[Storage] = []
    for tensor in tensors(result):
        if ordinary(tensor):
            storage = storage_of(tensor)
            if storage not in made and storage.nbytes():
                made.append(storage)
    return made


def tiny(tensor: Tensor, nbytes: int) -> bool:
    """Whether it is a number, or a few integers: lengths, indices, batch sizes.

    Code of torch above its operators reads these by their address, between operators: that of a packed sequence does.
    """
    if nbytes <= _NUMBER_BYTES:
        return True
    lengths = tensor.dtype is torch.int64 and tensor.dim() == 1
    few = nbytes <= (_LENGTHS_BYTES if lengths else _TINY_BYTES)
    return few and not tensor.is_floating_point() and not tensor.is_complex()


def new_storages(result: Any) -> list[Storage]:
    """Those of `storages` that belong to no value yet."""
    return [storage for storage in storages(result) if not hasattr(storage, "_recompute")]


def new_memories(result: Any, known: Sequence[Any] = ()) -> list[Memory]:
    """Memory in each of the new storages."""
    new = [storage for storage in new_storages(result) if storage not in known]
    own = [(tensor, storage_of(tensor)) for tensor in tensors(result) if ordinary(tensor)]
    small = {id(storage) for tensor, storage in own if tiny(tensor, storage.nbytes())}
    return [Memory(device_name(made.device), made.nbytes(), ref(made), None, tiny=id(made) in small) for made in new]


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(now)


def _constant(argument: Any) -> Any:
    """What of an argument decides sizes: all but where in its storage a tensor begins."""
    cls = type(argument)
    return argument[0] if cls is tuple else tuple(map(_constant, argument)) if cls is list else argument
