"""How the networks are trained: each a task with its parameters, its optimizers, and a function that makes one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from _torch_networks import Recurrent, ResNet, Run, Transformer, Tree, TreeLSTM, UNet, perceptron, straight


@dataclass(frozen=True)
class Task:
    """A training that is about to begin; another one that was made the same way takes the same steps."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[], Tensor]
    """Draws a batch, updates the parameters, returns the loss. Random numbers come from torch's generator."""

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers, gradients, and what the optimizers remember."""
        found: dict[str, Tensor] = {}
        for number, module in enumerate(self.modules):
            found |= {
                f"{number}.{name}": tensor for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
            found |= {f"{number}.{name}.grad": gradient for name, gradient in gradients.items() if gradient is not None}
        for number, optimizer in enumerate(self.optimizers):
            for place, memory in enumerate(optimizer.state.values()):
                found |= {f"optimizer {number}.{place}.{name}": tensor for name, tensor in _tensors(memory)}
        return found


def _tensors(memory: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, entry in memory.items():
        if isinstance(entry, Tensor):
            yield name, entry


def _simple(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], clip: float | None = None
) -> Task:
    """A task with one loss."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]  # as it is in torch
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return Task((module,), (optimizer,), step)


def resnet(batch: int = 8, depth: int = 6, channels: int = 8, size: int = 16, run: Run = straight) -> Task:
    """Batch norm, activations and additions in place; SGD with momentum."""
    module = ResNet(depth, channels, run)

    def loss() -> Tensor:
        return functional.cross_entropy(module(torch.randn(batch, 3, size, size)), torch.randint(10, (batch,)))

    return _simple(module, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9), loss)


def unet(batch: int = 8, levels: int = 2, channels: int = 6, size: int = 32, run: Run = straight) -> Task:
    """Concatenations that keep early activations for late layers; Adam."""
    module = UNet(levels, channels, run)

    def loss() -> Tensor:
        picture = torch.randn(batch, 3, size, size)
        target = (picture.sum(1, keepdim=True) > 0).float()
        return functional.binary_cross_entropy_with_logits(module(picture), target)

    return _simple(module, torch.optim.Adam(module.parameters(), 1e-3, foreach=True), loss)


def transformer(
    batch: int = 8, depth: int = 3, width: int = 32, heads: int = 2, length: int = 32, run: Run = straight
) -> Task:
    """Attention and dropout under autocast in bfloat16; AdamW in one kernel, clipped gradients."""
    module = Transformer(depth, width, heads, 64, length, run)

    def loss() -> Tensor:
        tokens = torch.randint(64, (batch, length + 1))
        with torch.autocast("cpu", torch.bfloat16):
            logits = module(tokens[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return _simple(module, torch.optim.AdamW(module.parameters(), 1e-3, fused=True), loss, clip=1.0)


def lstm(batch: int = 16, length: int = 24, width: int = 16, layers: int = 4) -> Task:
    """A recurrent layer of torch's own, with dropout between the layers; Adam."""
    module = Recurrent(32, width, layers)

    def loss() -> Tensor:
        tokens = torch.randint(32, (batch, length))
        return functional.cross_entropy(module(tokens), (tokens.sum(1) % 2))

    return _simple(module, torch.optim.Adam(module.parameters(), 1e-2), loss)


def treelstm(batch: int = 32, leaves: int = 16, width: int = 16) -> Task:
    """Another tree in each step; Adagrad."""
    module = TreeLSTM(32, width)

    def loss() -> Tensor:
        tokens = torch.randint(32, (batch, leaves))
        return functional.cross_entropy(module(tokens, _tree(leaves)), tokens.sum(1) % 2)

    return _simple(module, torch.optim.Adagrad(module.parameters(), 1e-2), loss)


def _tree(leaves: int) -> Tree:
    """A random one: two roots are joined until one is left."""
    roots, tree = list(range(leaves)), []
    while len(roots) > 1:
        at = int(torch.randint(len(roots) - 1, ()))
        tree.append((roots[at], roots[at + 1]))
        roots[at : at + 2] = [leaves + len(tree) - 1]
    return tree


def gan(batch: int = 128, width: int = 32, unrolled: int = 4) -> Task:
    """The generator looks ahead at steps of the discriminator (Metz and others, ICLR 2017): gradients of gradients."""
    generator, discriminator = perceptron(8, width, width, 2), perceptron(2, width, width, 1)
    makes = torch.optim.Adam(generator.parameters(), 1e-3)
    judges = torch.optim.Adam(discriminator.parameters(), 1e-3)
    rate = 0.1

    def deceived(parameters: Mapping[str, Tensor], true: Tensor, made: Tensor) -> Tensor:
        """What the discriminator would like to be small."""
        verdict = functional_call(discriminator, dict(parameters), (torch.cat([true, made]),))
        expected = torch.cat([torch.ones(len(true), 1), torch.zeros(len(made), 1)])
        return functional.binary_cross_entropy_with_logits(verdict, expected)

    def step() -> Tensor:
        angle = torch.rand(batch, 1) * 6.28
        true = torch.cat([angle.cos(), angle.sin()], 1)
        made = generator(torch.randn(batch, 8))
        parameters = dict(discriminator.named_parameters())
        loss = deceived(parameters, true, made.detach())
        judges.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # as it is in torch
        judges.step()
        ahead: dict[str, Tensor] = dict(parameters)
        for _ in range(unrolled):
            slopes = torch.autograd.grad(deceived(ahead, true, made), list(ahead.values()), create_graph=True)
            ahead = {name: parameter - rate * by for (name, parameter), by in zip(ahead.items(), slopes, strict=True)}
        makes.zero_grad()
        (-deceived(ahead, true, made)).backward()  # type: ignore[no-untyped-call]  # as it is in torch
        makes.step()
        return loss.detach()

    return Task((generator, discriminator), (makes, judges), step)


TASKS: Final[dict[str, Callable[..., Task]]] = {
    "resnet": resnet,
    "unet": unet,
    "transformer": transformer,
    "lstm": lstm,
    "treelstm": treelstm,
    "gan": gan,
}
