"""A small training with everything that writes behind the program's back, and what a fault in it must leave."""

from __future__ import annotations

import copy
from typing import Any

import torch
from _torch_programs import check_records
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recompute_torch as rt

BUDGET = 2_000
"""Bytes, in which some of its activations have to be made again."""


class Training:
    """A network with batch norm and dropout, its optimizer, and what it has kept of its activations."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.25), nn.Linear(8, 4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.kept: list[torch.Tensor] = []

    def step(self, seed: int) -> None:
        """One step on data that the seed decides."""
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        given = torch.rand(5, 6, generator=generator)
        self.optimizer.zero_grad()
        hidden = self.model(given)
        self.kept += [given, hidden]
        (hidden.sin() * hidden).square().sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers, gradients and momenta by name."""
        found = dict(self.model.state_dict(keep_vars=True))
        for name, parameter in self.model.named_parameters():
            found[f"{name}.grad"] = parameter.grad
            found[f"{name}.momentum"] = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
        return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}

    def contents(self) -> dict[str, bytes]:
        """What is in each of these."""
        return {name: tensor.numpy(force=True).tobytes() for name, tensor in self.state().items()}

    def copied(self) -> Training:
        """The same training on memory of its own, as far as it has come."""
        other = Training()
        other.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        state = {name: tensor.clone() for name, tensor in self.state().items()}
        for name, parameter in other.model.named_parameters():
            parameter.grad = state.get(f"{name}.grad")
            if f"{name}.momentum" in state:
                other.optimizer.state[parameter]["momentum_buffer"] = state[f"{name}.momentum"]
        return other


class Watching(TorchDispatchMode):
    """Remembers all that was ever in the tensors of a training, and so what may be there after a fault."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training
        self.seen: dict[str, set[bytes]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = func(*args, **(kwargs or {}))
        self.look()
        return result

    def look(self) -> None:
        """Remember what is there now."""
        for name, content in self._training.contents().items():
            self.seen.setdefault(name, set()).add(content)


def plain_steps() -> tuple[dict[str, set[bytes]], list[torch.Tensor]]:
    """All that is ever in the tensors of two steps of plain torch, and the activations that they keep."""
    training = Training()
    with Watching(training) as watching:
        training.step(1)
        training.step(2)
    watching.look()
    return watching.seen, training.kept


def go_on(block: rt.budget, training: Training, allowed: dict[str, set[bytes]]) -> Training:
    """After a fault the training has content that it may have, and goes on; how it was when it went on."""
    check_records(block)
    block.budget = None  # as it was, the fault may have come of it
    copied = training.copied()
    training.step(3)
    del training.kept[-2:]
    block.cache.release_memory()
    for name, content in copied.contents().items():
        assert content in allowed[name], name
    return copied


def check_left(block: rt.budget, training: Training, copied: Training, kept: list[torch.Tensor]) -> None:
    """After the block all is ordinary, and the steps that were made inside and after it are those of plain torch."""
    assert not block.stats().used
    for value in [*training.state().values(), *training.kept]:
        assert not hasattr(value.untyped_storage(), "_recompute")
    for one, other in zip(training.kept, kept, strict=False):
        assert torch.equal(one, other)
    copied.step(3)
    assert training.contents() == copied.contents()
    training.step(4)
    copied.step(4)
    assert training.contents() == copied.contents()
