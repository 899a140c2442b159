"""What the memory of a training is held by, and its floor: what must be in memory together at its tightest operator.

Parameters, gradients, optimizers, inputs and the like, activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch

import recompute as rc
from recompute import text
from recompute.extend import EVICTED, Pool, Value, node_of
from recompute.text import format_bytes
from recompute_torch._memory import storage_of
from recompute_torch._recipe import ordinary, tensors

Tensor = torch.Tensor

T = TypeVar("T")

Alive = WeakValueDictionary[int, T]
"""By identity: tensors compare by their elements."""

KINDS: Final = ("parameters", "gradients", "optimizer", "inputs and others", "activations")


@dataclass(frozen=True)
class Parts:
    """Bytes in memory on one device, by what holds them."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """What optimizers remember of each parameter."""
    others: int = 0
    """Inputs, buffers, and whatever else stays: how to make it again is not known, or it was written in place."""
    operator: int = 0
    """What the largest operator takes and makes, beyond these."""
    name: str = ""
    """Of that operator."""

    @property
    def total(self) -> int:
        """All of them together."""
        return self.parameters + self.gradients + self.optimizer + self.others + self.operator

    def __str__(self) -> str:
        sizes = self.parameters, self.gradients, self.optimizer, self.others
        parts = [f"{kind} {format_bytes(size)}" for kind, size in zip(KINDS[:4], sizes, strict=True)]
        return f"{', '.join(parts)}, and {format_bytes(self.operator)} for {self.name}"


@dataclass
class Held:
    """Bytes of one kind, in memory and evicted."""

    here: int = 0
    gone: int = 0


class Holders:
    """The parameters and optimizers that a block has met, and so what each storage is there for."""

    def __init__(self) -> None:
        self._parameters: Alive[Tensor] = WeakValueDictionary()
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, int] = (
            WeakKeyDictionary()
        )  # and what they remembered
        self._handed_out: Alive[Any] = WeakValueDictionary()
        self._trains = get_ident()  # the thread of the last step, or of the block

    def meet(self, parameter: Tensor) -> None:
        """A parameter takes part."""
        self._parameters[id(parameter)] = parameter

    def hand_out(self, storage: Any) -> None:
        """The program refers to the memory of a storage."""
        self._handed_out[id(storage)] = storage

    def handed_out(self) -> int:
        """Bytes of these that are alive, and in no budget."""
        alive = _alive(self._handed_out.valuerefs())
        return sum(storage.nbytes() for storage in alive if not hasattr(storage, "_recompute"))

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer makes a step, or has made one."""
        self._trains = get_ident()
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = 0
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.meet(parameter)

    def remembered(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """What an optimizer remembers, if there is more of it than when this was last asked."""
        entries = sum([len(optimizer.state[parameter]) for parameter in list(optimizer.state)])
        if entries == self._optimizers.get(optimizer, 0):
            return []
        self._optimizers[optimizer] = entries
        return [tensor for tensor in tensors(list(optimizer.state.values())) if ordinary(tensor)]

    def parameters(self) -> list[Tensor]:
        """Those that are alive."""
        return _alive(self._parameters.valuerefs())

    def groups(self) -> dict[str, list[Tensor]]:
        """What optimizers remember, gradients, and parameters; a tensor of several counts as the last.

        In other threads than the one that trains there are no gradients: to read `grad` there while a backward pass
        writes it corrupts memory in PyTorch itself.
        """
        parameters = self.parameters()
        gradients = [parameter.grad for parameter in parameters] if get_ident() == self._trains else []
        remembered: list[Any] = []
        for optimizer in _alive(self._optimizers.keyrefs()):
            remembered += [optimizer.state[parameter] for parameter in list(optimizer.state)]
        return {
            "optimizer": list(tensors(remembered)),
            "gradients": [gradient for gradient in gradients if gradient is not None],
            "parameters": parameters,
        }

    def sizes(self, storages: Iterable[Any]) -> dict[str, Held]:
        """The bytes of storages that the cache knows, by kind, in memory and evicted."""
        kinds: dict[int, str] = {}  # by the identity of a storage
        for kind, group in self.groups().items():
            kinds |= {id(storage_of(tensor)): kind for tensor in group if ordinary(tensor)}
        sizes = {kind: Held() for kind in KINDS}
        for storage in storages:
            node = node_of(storage._recompute)
            kind = kinds.get(id(storage)) or ("activations" if node.operation is not None else "inputs and others")
            if node.payload is EVICTED:
                sizes[kind].gone += node.storage.size
            else:
                sizes[kind].here += node.storage.size
        return sizes


def _alive(references: Iterable[ref[T]]) -> list[T]:
    """What they refer to, of a copy: another thread may add some, or end the life of some."""
    return [thing for thing in [reference() for reference in references] if thing is not None]


_CURE: Final = "rt.least(step) says before a training what it needs"


class Floor:
    """The tightest operator on each device, of those that it is told about."""

    def __init__(self, holders: Holders, storages: Callable[[], list[Any]]) -> None:
        self._holders = holders
        self._storages = storages
        self.parts: dict[str, Parts] = {}

    def note(self, function: Any, nodes: Sequence[Value], made: Sequence[Value]) -> None:
        """An operator has run: what it took and made was in memory together, beside what stays."""
        storages = list({node.storage for node in (*nodes, *made) if node.storage.values})
        if storages:
            pool = storages[0].pool
            here = [storage for storage in storages if storage.pool is pool]
            size = sum(storage.size for storage in here if not any(node.stays for node in storage.values))
            known = self.parts.get(pool.device)
            if known is None or pool.sources + size > known.total:
                self.parts[pool.device] = self.now(pool, size, function.__name__)

    def now(self, pool: Pool, operator: int, name: str) -> Parts:
        """What stays on a device now, and an operator beside it."""
        pairs = [(storage, node_of(storage._recompute).storage) for storage in self._storages()]
        here = [(storage, node) for storage, node in pairs if node.pool is pool]
        sizes = self._holders.sizes(storage for storage, node in here if any(value.stays for value in node.values))
        parameters, gradients, optimizer = [sizes[kind].here for kind in KINDS[:3]]
        others = max(0, pool.sources - parameters - gradients - optimizer)
        return Parts(parameters, gradients, optimizer, others, operator, name)


class FloorWarning(UserWarning):
    """The next step needs more than the budget, if it is like the first one: what the optimizer remembers is new."""


def warn_of(floor: Floor, pools: Mapping[str, Pool]) -> None:
    """After the first step: warn if the next one, in which there is what the optimizer remembers, cannot work."""
    for device, seen in floor.parts.items():
        pool = pools[device]
        now = floor.now(pool, 0, "")
        needed = replace(seen, optimizer=max(seen.optimizer, now.optimizer))
        if needed.total > pool.limit:
            warn(needed, device, pool.limit)


def warn(needed: Parts, device: str, limit: float) -> None:
    """That the next step cannot work."""
    text.warn(
        f"the next step needs at least {format_bytes(needed.total)} ({needed.total} bytes) on {device}, if it is like "
        f"this one: {needed}; the budget is {format_bytes(limit)}. What the optimizer remembers stays there. Raise it, "
        "or take smaller batches; rt.least(step) says what a step needs",
        FloorWarning,
        stacklevel=text.outside("torch"),
    )


def explain(error: rc.BudgetError, floor: Floor, pools: Mapping[str, Pool]) -> None:
    """Say in the words of a training what the operator that found no room would have needed."""
    pool = pools.get(error.device or "")
    if pool is None or _CURE in str(error):  # nested operators: it has been said
        return
    parts = floor.now(pool, max(0, error.needed - pool.sources), error.operation or "a tensor")
    error.args = (f"{error}. {needs(parts, pool.device)}",)


def needs(parts: Parts, device: str) -> str:
    """What an operator that found no room would have needed, in the words of a training."""
    later = "" if parts.optimizer else "; what an optimizer remembers comes on top, from the second step on"
    return f"It needs at least {format_bytes(parts.total)} ({parts.total} bytes) on {device}: {parts}{later}. {_CURE}"
