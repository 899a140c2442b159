"""The models of benchmarks/torch_compile.py: each a loss of one batch, with blocks that may run as one likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from _torch_sizes_models import Run, _ResNet, _Transformer, _UNet, _words
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Step:
    """What is compiled: the loss of a batch."""

    module: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.module(x), y)

    @property
    def stays(self) -> int:
        """Bytes of parameters, buffers and batch."""
        tensors = [*self.module.parameters(), *self.module.buffers(), self.x, self.y]
        return sum(tensor.nbytes for tensor in tensors)


class _Bottleneck(nn.Module):
    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(given, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, 4 * channels, 1, bias=False), nn.BatchNorm2d(4 * channels)),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or given != 4 * channels:
            self.beside = nn.Sequential(
                nn.Conv2d(given, 4 * channels, 1, stride, bias=False), nn.BatchNorm2d(4 * channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.beside(x))


class _ResNet50(_ResNet):
    """Its blocks have three convolutions each, and there are 3, 4, 6 and 3 of them."""

    def __init__(self, run: Run, channels: int) -> None:
        super().__init__(run, channels, 1)
        blocks, given = [], channels
        for level, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(_Bottleneck(given, channels << level, 2 if level and not number else 1))
                given = 4 * channels << level
        self.blocks, self.leave = nn.ModuleList(blocks), nn.Linear(given, 10)


class _Lstm(nn.Module):
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


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class _LlamaLayer(nn.Module):
    """Attention with rotated positions, and a gated MLP, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = _RmsNorm(width), _RmsNorm(width)
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


class _Llama(nn.Module):
    def __init__(
        self, run: Run, words: int, width: int, depth: int, heads: int, hidden: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.run = run
        self.enter, self.leave = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList([_LlamaLayer(width, heads, hidden, dropout) for _ in range(depth)])
        self.norm = _RmsNorm(width)
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


class _Bert(nn.Module):
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


def llama(run: Run, quick: bool, *, dropout: float = 0.0, layers: int = 32) -> Step:
    """Llama, 32 layers of width 128, 4 heads, MLP 344, 2 x 256 tokens of 1,000"""
    words, width, heads, hidden, length = 1_000, 128, 4, 344, 256
    depth, length = (4, 32) if quick else (layers, length)
    return _text(_Llama(run, words, width, depth, heads, hidden, length, dropout), words, 2, length)


def bert(run: Run, quick: bool, *, dropout: float = 0.1, layers: int = 32) -> Step:
    """BERT, 32 layers of width 192, 3 heads, MLP 768, 2 x 256 tokens of 1,000"""
    depth, length = (4, 32) if quick else (layers, 256)
    return _text(_Bert(run, 1_000, 192, depth, 3, 768, length, dropout), 1_000, 2, length)


def _images(module: nn.Module, batch: int, size: int) -> Step:
    x, y = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Step(module, x, y, functional.cross_entropy)


def _text(module: nn.Module, words: int, batch: int, length: int) -> Step:
    x = torch.randint(words, (batch, length))
    return Step(module, x, x.roll(-1, 1), _words)


def resnet18(run: Run, quick: bool) -> Step:
    """ResNet-18, 8 images of 112 x 112"""
    return _images(_ResNet(run, 8 if quick else 64, 1 if quick else 2), 2 if quick else 8, 32 if quick else 112)


def resnet50(run: Run, quick: bool) -> Step:
    """ResNet-50, 4 images of 112 x 112"""
    return _images(_ResNet50(run, 4 if quick else 64), 2 if quick else 4, 32 if quick else 112)


def unet(run: Run, quick: bool) -> Step:
    """U-Net, 4 levels from 16 channels, 4 pictures of 96 x 96"""
    channels, levels, size, batch = (4, 2, 32, 2) if quick else (16, 4, 96, 4)
    x = torch.randn(batch, 3, size, size)
    target = (x.sum(1, keepdim=True) > 0).float()
    return Step(_UNet(run, channels, levels), x, target, functional.binary_cross_entropy_with_logits)


def gpt2(run: Run, quick: bool) -> Step:
    """GPT-2, 6 blocks of width 256, 4 x 256 tokens of 2,000"""
    width, depth, length, batch, words = (64, 2, 32, 2, 100) if quick else (256, 6, 256, 4, 2_000)
    module = _Transformer(run, nn.Embedding(words, width), width, depth, length, words, causal=True)
    return _text(module, words, batch, length)


def vit(run: Run, quick: bool) -> Step:
    """ViT, 8 blocks of width 192, 8 images of 112 x 112 in patches of 8"""
    width, depth, size, patch, batch = (64, 2, 32, 8, 2) if quick else (192, 8, 112, 8, 8)
    enter = nn.Conv2d(3, width, patch, patch)
    return _images(_Transformer(run, enter, width, depth, (size // patch) ** 2, 10, causal=False), batch, size)


def lstm(run: Run, quick: bool) -> Step:
    """LSTM of width 256, 32 x 48 tokens of 1,000, blocks of 8 steps"""
    words, width, batch, length = (50, 16, 2, 16) if quick else (1_000, 256, 32, 48)
    return _text(_Lstm(run, words, width, 8), words, batch, length)


MODELS: Final[dict[str, Callable[[Run, bool], Step]]] = {
    model.__name__: model for model in (resnet18, resnet50, unet, gpt2, vit, lstm)
}
