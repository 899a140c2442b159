"""Small modules to compile with a budget, and what is left of a few of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import recompute as rc
import recompute_torch as rt

Loss = Callable[[Tensor], Tensor]

CHANNELS = 8


class Glu(nn.Module):
    """Views of one storage that meet again."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.cat([x, x.flip(1)], 1).chunk(2, 1)
        return left * torch.sigmoid(right.transpose(2, 3)).transpose(2, 3)


class Counting(nn.Module):
    """A buffer that the forward changes, and reads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.seen[:, None, None].detach().clone()
        self.seen.mul_(0.5).add_(x.detach().mean((0, 2, 3)))
        return torch.tanh(scaled) + self.seen[:, None, None]


class Halves(nn.Module):
    """Parts of a buffer that changes once they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.linspace(1, 2, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.seen.detach().clone()[:, None, None].chunk(2)
        left, right = x.chunk(2, 1)
        found = torch.cat([left * one, right * two], 1)
        self.seen.mul_(0.5)
        return found


class InPlace(nn.Module):
    """Writes to what it made, and to a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, ::2] = x[:, ::2].sin()
        y[:, 1::2].add_(x[:, 1::2]).mul_(2)
        return y.clamp_(-3, 3)


class Residual(nn.Module):
    """Two layers and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU(True))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x)
        return x + inner


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "linear": lambda: nn.Linear(12, 12),
    "norm": lambda: nn.BatchNorm2d(CHANNELS),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "dropout": lambda: nn.Dropout(0.3),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "pool": lambda: nn.AvgPool2d(3, 1, 1),
    "glu": Glu,
    "counting": Counting,
    "halves": Halves,
    "in place": InPlace,
    "residual": Residual,
}


def runs(names: Sequence[str]) -> bool:
    """Whether eager mode can: it refuses a ReLU in place that overwrites what another one keeps."""
    return ("relu in place", "relu in place") not in pairwise(names)


class Network(nn.Module):
    """Layers in a row, and a loss."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, CHANNELS, 3, padding=1)
        self.layers = nn.ModuleList([LAYERS[name]() for name in names])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean()


def network(names: Sequence[str]) -> Network:
    """The same network each time."""
    torch.manual_seed(0)
    return Network(names)


def image() -> Tensor:
    """A batch for it."""
    torch.manual_seed(1)
    return torch.randn(4, 2, 12, 12, requires_grad=True)


def left(module: nn.Module, step: Callable[..., Any], *given: Tensor, steps: int = 2) -> list[Tensor]:
    """Losses, gradients and buffers after some steps."""
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        module.zero_grad()
        loss = step(*given)
        loss.backward()
        losses.append(loss.detach())
    gradients = [tensor.grad for tensor in (*module.parameters(), *given) if tensor.grad is not None]
    return [*losses, *[gradient.clone() for gradient in gradients], *[buffer.clone() for buffer in module.buffers()]]


def compiled(module: Callable[..., Any], budget: int | float | str, **options: Any) -> Any:
    """Quickly planned; a float is a share of the peak."""
    torch.compiler.reset()
    named = {"of_peak" if isinstance(budget, float) else "budget": budget}
    return rt.planned(module, **{"effort": 0.03, "costs": "estimated", **named, **options})


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """To the last bit."""
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def within(
    names: Sequence[str], budget: float, **options: Any
) -> tuple[list[Tensor], list[Tensor], rt.GraphPlan] | None:
    """What eager mode leaves, what the compiled step leaves, and its plan; None: it was refused before anything ran."""
    plain, module = network(names), network(names)
    expected = left(plain, plain, image())
    step = compiled(module, budget, **options)
    try:
        found = left(module, step, image())
    except rc.BudgetError:
        assert not rt.plans(step).graphs
        return None
    (plan,) = rt.plans(step)
    return expected, found, plan
