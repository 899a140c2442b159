"""The modules of the models in `_torch_models.py`: each has blocks that a way to save memory may run as it likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Run = Callable[..., Any]
"""Calls a block with what it is given."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.take, self.give = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.take(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.give(found.transpose(1, 2).reshape(batch, length, width))
        wide: Tensor = x + self.narrow(functional.gelu(self.wide(self.second(x)), approximate="tanh"))
        return wide


class Transformer(nn.Module):
    def __init__(self, run: Run, enter: nn.Module, width: int, depth: int, length: int, out: int, causal: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.run, self.causal = enter, nn.Linear(width, out), run, causal
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList([Attention(width, max(1, width // 64), causal) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = (x if x.dim() == 3 else x.flatten(2).transpose(1, 2)) + self.places
        for block in self.blocks:
            x = self.run(block, x)
        found: Tensor = self.leave(x if self.causal else x.mean(1))
        return found


class Residual(nn.Module):
    """Convolutions with batch norm beside what was given, which one more convolution brings to their shape."""

    expansion = 1

    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.width = self.expansion * channels
        self.path = nn.Sequential(*self.layers(given, channels, stride))
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or given != self.width:
            self.beside = nn.Sequential(nn.Conv2d(given, self.width, 1, stride, bias=False), nn.BatchNorm2d(self.width))

    def layers(self, given: int, channels: int, stride: int) -> Sequence[nn.Module]:
        return (
            *(nn.Conv2d(given, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.beside(x))


class Bottleneck(Residual):
    """Three convolutions, the second one with few channels."""

    expansion = 4

    def layers(self, given: int, channels: int, stride: int) -> Sequence[nn.Module]:
        return (
            *(nn.Conv2d(given, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, self.width, 1, bias=False), nn.BatchNorm2d(self.width)),
        )


class ResNet(nn.Module):
    def __init__(self, run: Run, channels: int, counts: Sequence[int], kind: type[Residual] = Residual) -> None:
        """`counts`: how many blocks of this kind each level has."""
        super().__init__()
        self.run = run
        self.enter = nn.Sequential(
            *(nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)),
            *(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        )
        blocks, given = [], channels
        for level, count in enumerate(counts):
            for number in range(count):
                blocks.append(kind(given, channels << level, 2 if level and not number else 1))
                given = blocks[-1].width
        self.blocks, self.leave = nn.ModuleList(blocks), nn.Linear(given, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.run(block, x)
        found: Tensor = self.leave(x.mean((2, 3)))
        return found


class UNet(nn.Module):
    def __init__(self, run: Run, channels: int, levels: int) -> None:
        super().__init__()
        self.run = run
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList([Residual(channels << n, channels << n + 1, 2) for n in range(levels)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(channels << n + 1, channels << n, 2, 2) for n in range(levels)])
        self.join = nn.ModuleList([Residual(channels << n + 1, channels << n, 1) for n in range(levels)])
        self.leave = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        kept = []
        for block in self.down:
            kept.append(x)
            x = self.run(block, x)
        for up, join, beside in reversed(list(zip(self.up, self.join, kept, strict=True))):
            x = self.run(join, torch.cat([up(x), beside], 1))
        found: Tensor = self.leave(x)
        return found


class Lstm(nn.Module):
    """Cells in a loop, which torch.compile unrolls; a block is some steps in time."""

    def __init__(self, run: Run, words: int, width: int, piece: int) -> None:
        super().__init__()
        self.enter, self.cell, self.leave = (
            nn.Embedding(words, width),
            nn.LSTMCell(width, width),
            nn.Linear(width, words),
        )
        self.run, self.piece = run, piece

    def _steps(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for number in range(x.shape[1]):
            h, c = self.cell(x[:, number], (h, c))
            found.append(h)
        return torch.stack(found, 1), h, c

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        found = []
        for start in range(0, x.shape[1], self.piece):
            made, h, c = self.run(self._steps, x[:, start : start + self.piece], h, c)
            found.append(made)
        scores: Tensor = self.leave(torch.cat(found, 1))
        return scores


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class LlamaLayer(nn.Module):
    """Attention with rotated positions, and a gated MLP, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down, self.heads, self.dropout = nn.Linear(hidden, width, bias=False), heads, nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.first(x)
        q, k, v = (
            project(y).view(batch, length, self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.o(found.transpose(1, 2).reshape(batch, length, width)))
        y = self.second(x)
        made: Tensor = x + self.dropout(self.down(functional.silu(self.gate(y)) * self.up(y)))
        return made


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


class Llama(nn.Module):
    def __init__(
        self, run: Run, words: int, width: int, depth: int, heads: int, hidden: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.run = run
        self.enter, self.leave = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList([LlamaLayer(width, heads, hidden, dropout) for _ in range(depth)])
        self.norm = RmsNorm(width)
        size = width // heads
        angles = torch.outer(torch.arange(length), 10_000 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = self.run(layer, x, self.cos, self.sin)
        found: Tensor = self.leave(self.norm(x))
        return found


class Bert(nn.Module):
    def __init__(
        self, run: Run, words: int, width: int, depth: int, heads: int, hidden: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.run, self.enter, self.places = run, nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm, self.leave, self.dropout = nn.LayerNorm(width), nn.Linear(width, words), nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, heads, hidden, dropout, "gelu", batch_first=True) for _ in range(depth)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.enter(x) + self.places.weight))
        for layer in self.layers:
            x = self.run(layer, x)
        found: Tensor = self.leave(x)
        return found
