"""Networks of the DTR paper in PyTorch, small enough for a CPU: nothing in them knows of a budget."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Run = Callable[..., Any]
"""Runs a block of a network on tensors: `run(block, *tensors)`; `torch.utils.checkpoint` has this form."""


def straight(block: Callable[..., Any], *given: Any) -> Any:
    """A block as it is."""
    return block(*given)


class Residual(nn.Module):
    """Two convolutions with batch norm, and what was before added in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm_one(self.one(x)))
        y = self.norm_two(self.two(y))
        y += x
        return self.relu(y)  # type: ignore[no-any-return]  # modules return anything


class ResNet(nn.Module):
    """A stem, residual blocks, half of them after a convolution with stride 2, and a classifier."""

    def __init__(self, depth: int, channels: int, run: Run = straight) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.first = nn.ModuleList(Residual(channels) for _ in range(depth - depth // 2))
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.second = nn.ModuleList(Residual(2 * channels) for _ in range(depth // 2))
        self.head = nn.Linear(2 * channels, 10)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.first:
            x = self.run(block, x)
        x = self.down(x)
        for block in self.second:
            x = self.run(block, x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]  # modules return anything


def convolutions(before: int, after: int) -> nn.Sequential:
    """Twice a convolution, batch norm and an activation in place."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, with what was seen on the way down beside it."""

    def __init__(self, levels: int, channels: int, run: Run = straight) -> None:
        super().__init__()
        widths = [channels << level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            convolutions(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[:-1])
        self.up = nn.ModuleList(convolutions(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(channels, 1, 1)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = self.run(block, functional.max_pool2d(x, 2) if level else x)
            seen.append(x)
        seen.pop()
        for rise, block in zip(reversed(self.rise), reversed(self.up), strict=True):
            x = self.run(block, torch.cat([seen.pop(), rise(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]  # modules return anything


class Attention(nn.Module):
    """A transformer's block: attention and a network of two layers, both after a layer norm and with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        y = self.narrow(functional.gelu(self.wide(self.between(x))))
        return x + self.dropout(y)  # type: ignore[no-any-return]  # modules return anything


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, depth: int, width: int, heads: int, tokens: int, length: int, run: Run = straight) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.run(block, x)
        return functional.linear(self.norm(x), self.token.weight)


class Recurrent(nn.Module):
    """An LSTM over tokens, and a classifier of its mean output."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(tokens))[0].mean(1))  # type: ignore[no-any-return]  # modules return anything


Tree = list[tuple[int, int]]
"""The two children of each inner node, children first: leaves have the numbers 0 to n, then come the nodes in order."""


class TreeLSTM(nn.Module):
    """A binary TreeLSTM (Tai, Socher and Manning, ACL 2015): another graph for each tree."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, 2 * width)
        self.gates = nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, 2)

    def forward(self, leaves: Tensor, tree: Tree) -> Tensor:
        """`leaves`: batch x leaves, tokens; all of the batch have the same tree."""
        states = [self.token(leaf).chunk(2, -1) for leaf in leaves.unbind(1)]
        for left, right in tree:
            (h_left, c_left), (h_right, c_right) = states[left], states[right]
            gates = self.gates(torch.cat([h_left, h_right], -1))
            update, enter, leave, keep_left, keep_right = gates.chunk(5, -1)
            cell = update.tanh() * enter.sigmoid() + c_left * keep_left.sigmoid() + c_right * keep_right.sigmoid()
            states.append((leave.sigmoid() * cell.tanh(), cell))
        return self.head(states[-1][0])  # type: ignore[no-any-return]  # modules return anything


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with a smooth activation in between."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Softplus()]
    return nn.Sequential(*layers[:-1])
