"""What the memory of a training is held by: parameters, gradients, optimizers, inputs and the like, activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import torch

from recompute.extend import EVICTED
from recompute.text import format_bytes
from recompute_torch._memory import storage_of
from recompute_torch._recipe import ordinary

Tensor = torch.Tensor

KINDS: Final = ("parameters", "gradients", "optimizer", "inputs and others", "activations")


@dataclass(frozen=True)
class Parts:
    """Bytes in memory on one device, by what holds them."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    """What optimizers remember of each parameter."""
    others: int = 0
    """Inputs, buffers, and whatever else stays: nobody knows how to make it again, or it was written in place."""
    operator: int = 0
    """What the largest operator takes and makes, beyond these."""
    name: str = ""
    """Of that operator."""

    @property
    def total(self) -> int:
        """All of them together."""
        return self.parameters + self.gradients + self.optimizer + self.others + self.operator

    def __str__(self) -> str:
        found = [
            f"{what} {format_bytes(size)}"
            for what, size in (
                ("parameters", self.parameters),
                ("gradients", self.gradients),
                ("optimizer", self.optimizer),
                ("inputs and others", self.others),
            )
        ]
        return f"{', '.join(found)}, and {format_bytes(self.operator)} for {self.name}"


@dataclass
class Held:
    """Bytes of one kind, in memory and evicted."""

    here: int = 0
    gone: int = 0


class Holders:
    """The parameters and optimizers that a block has met, and so what each storage is there for."""

    def __init__(self) -> None:
        self._parameters: dict[int, ref[Tensor]] = {}  # by identity: tensors compare by their elements
        self._optimizers: dict[int, ref[torch.optim.Optimizer]] = {}
        self._entries: dict[int, int] = {}  # of what optimizers remember, by their identity
        self._handed_out: dict[int, ref[Any]] = {}

    def meet(self, parameter: Tensor) -> None:
        """A parameter takes part."""
        known = self._parameters
        number = id(parameter)
        known[number] = ref(parameter, lambda _: known.pop(number, None))

    def hand_out(self, storage: Any) -> None:
        """Somebody refers to the memory of a storage."""
        known = self._handed_out
        number = id(storage)
        known[number] = ref(storage, lambda _: known.pop(number, None))

    def handed_out(self) -> int:
        """Bytes of these that are alive, and in no budget."""
        found = [each() for each in list(self._handed_out.values())]
        return sum(each.nbytes() for each in found if each is not None and not hasattr(each, "_recompute"))

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        if id(optimizer) not in self._optimizers:
            known = self._optimizers
            number = id(optimizer)
            known[number] = ref(optimizer, lambda _: known.pop(number, None))
            self._entries.pop(number, None)
            for group in optimizer.param_groups:
                for each in group["params"]:
                    self.meet(each)

    def remembered(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """What an optimizer remembers, if there is more of it than when this was last asked."""
        entries = sum([len(optimizer.state[each]) for each in list(optimizer.state)])
        if entries == self._entries.get(id(optimizer)):
            return []
        self._entries[id(optimizer)] = entries
        return [each for each in _tensors(list(optimizer.state.values())) if _has_storage(each)]

    def parameters(self) -> list[Tensor]:
        """Those that are alive."""
        found = [each() for each in list(self._parameters.values())]
        return [each for each in found if each is not None]

    def groups(self) -> dict[str, list[Tensor]]:
        """What optimizers remember, gradients, and parameters; a tensor of several counts as the last."""
        parameters = self.parameters()
        remembered: list[Any] = []
        for reference in list(self._optimizers.values()):
            optimizer = reference()
            if optimizer is not None:
                remembered += [optimizer.state[each] for each in list(optimizer.state)]
        return {
            "optimizer": list(_tensors(remembered)),
            "gradients": [each.grad for each in parameters if each.grad is not None],
            "parameters": parameters,
        }

    def kinds(self) -> dict[int, str]:
        """What a storage is there for, by its identity; those of activations and others are not in it."""
        found: dict[int, str] = {}
        for kind, tensors in self.groups().items():
            for tensor in tensors:
                if _has_storage(tensor):
                    found[id(storage_of(tensor))] = kind
        return found

    def sizes(self, storages: Iterable[Any]) -> dict[str, Held]:
        """The bytes of storages that the cache knows, by kind, in memory and evicted."""
        kinds = self.kinds()
        found = {kind: Held() for kind in KINDS}
        for storage in storages:
            node = storage._recompute.node
            kind = kinds.get(id(storage)) or ("activations" if node.operation is not None else "inputs and others")
            if node.payload is EVICTED:
                found[kind].gone += node.storage.size
            else:
                found[kind].here += node.storage.size
        return found


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and ordinary(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
