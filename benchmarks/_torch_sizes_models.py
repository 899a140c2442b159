"""The models of benchmarks/torch_sizes.py: each has blocks that a way to save memory may run as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Run = Callable[..., Any]
"""Calls a block with what it is given."""


def straight(block: Any, *given: Any) -> Any:
    """A block of a model as it is."""
    return block(*given)


def checkpointed(block: Any, *given: Any) -> Any:
    """A block of a model under torch.utils.checkpoint."""
    return checkpoint(block, *given, use_reentrant=False)


class Training:
    """A model, its optimizer, and a batch that stays the same."""

    module: Any

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.module, self.x, self.y, self._loss = module, x, y, loss
        self._optimizer = torch.optim.AdamW(module.parameters(), 1e-4)
        self.stays = 4 * sum(parameter.nbytes for parameter in module.parameters()) + x.nbytes + y.nbytes
        """Bytes of parameters, gradients, what the optimizer remembers, and the batch."""

    def step(self) -> Tensor:
        """One step; the loss."""
        self._optimizer.zero_grad()
        loss = self._loss(self.module(self.x), self.y)
        loss.backward()  # type: ignore[no-untyped-call]  # as it is in torch
        self._optimizer.step()
        return loss.detach()


class _Attention(nn.Module):
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


class _Transformer(nn.Module):
    def __init__(self, run: Run, enter: nn.Module, width: int, depth: int, length: int, out: int, causal: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.run, self.causal = enter, nn.Linear(width, out), run, causal
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList([_Attention(width, max(1, width // 64), causal) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = (x if x.dim() == 3 else x.flatten(2).transpose(1, 2)) + self.places
        for block in self.blocks:
            x = self.run(block, x)
        found: Tensor = self.leave(x if self.causal else x.mean(1))
        return found


def _words(scores: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def gpt2(run: Run, small: bool) -> Training:
    """GPT-2, 6 blocks of width 384, 4 x 512 tokens, AdamW"""
    width, depth, length, batch, words = (64, 2, 32, 2, 100) if small else (384, 6, 512, 4, 8_000)
    return gpt2_of(run, width, depth, length, batch, words)


def gpt2_of(run: Run, width: int, depth: int, length: int, batch: int, words: int) -> Training:
    """GPT-2 of any size."""
    module = _Transformer(run, nn.Embedding(words, width), width, depth, length, words, causal=True)
    x = torch.randint(words, (batch, length))
    return Training(module, x, x.roll(-1, 1), _words)


def vit(run: Run, small: bool) -> Training:
    """ViT, 8 blocks of width 256, 16 images of 160 x 160 in patches of 10, AdamW"""
    width, depth, size, batch = (64, 2, 40, 2) if small else (256, 8, 160, 16)
    module = _Transformer(run, nn.Conv2d(3, width, 10, 10), width, depth, (size // 10) ** 2, 10, causal=False)
    return Training(module, torch.randn(batch, 3, size, size), torch.randint(10, (batch,)), functional.cross_entropy)


class _Residual(nn.Module):
    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(given, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or given != channels:
            self.beside = nn.Sequential(nn.Conv2d(given, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.beside(x))


class _ResNet(nn.Module):
    def __init__(self, run: Run, channels: int, blocks_per_level: int) -> None:
        super().__init__()
        self.run = run
        self.enter = nn.Sequential(
            *(nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels)),
            *(nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        )
        blocks, given = [], channels
        for level in range(4):
            for number in range(blocks_per_level):
                blocks.append(_Residual(given, channels << level, 2 if level and not number else 1))
                given = channels << level
        self.blocks, self.leave = nn.ModuleList(blocks), nn.Linear(given, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.run(block, x)
        found: Tensor = self.leave(x.mean((2, 3)))
        return found


def resnet(run: Run, small: bool) -> Training:
    """ResNet-18, 16 images of 160 x 160, AdamW"""
    channels, blocks_per_level, size, batch = (8, 1, 32, 2) if small else (64, 2, 160, 16)
    x = torch.randn(batch, 3, size, size)
    return Training(_ResNet(run, channels, blocks_per_level), x, torch.randint(10, (batch,)), functional.cross_entropy)


class _UNet(nn.Module):
    def __init__(self, run: Run, channels: int, levels: int) -> None:
        super().__init__()
        self.run = run
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList([_Residual(channels << n, channels << n + 1, 2) for n in range(levels)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(channels << n + 1, channels << n, 2, 2) for n in range(levels)])
        self.join = nn.ModuleList([_Residual(channels << n + 1, channels << n, 1) for n in range(levels)])
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


def unet(run: Run, small: bool) -> Training:
    """U-Net, 4 levels from 16 channels, 8 pictures of 160 x 160, AdamW"""
    channels, levels, size, batch = (4, 2, 32, 2) if small else (16, 4, 160, 8)
    x = torch.randn(batch, 3, size, size)
    target = (x.sum(1, keepdim=True) > 0).float()
    return Training(_UNet(run, channels, levels), x, target, functional.binary_cross_entropy_with_logits)


MODELS: Final[dict[str, Callable[[Run, bool], Training]]] = {"gpt2": gpt2, "resnet": resnet, "unet": unet, "vit": vit}
