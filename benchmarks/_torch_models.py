"""The models of torch_sizes.py and torch_compile.py: the loss of a batch, and a training that makes it smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from _torch_modules import Bert, Bottleneck, Llama, Lstm, Residual, ResNet, Run, Transformer, UNet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def straight(block: Any, *given: Any) -> Any:
    """A block of a model as it is."""
    return block(*given)


def checkpointed(block: Any, *given: Any) -> Any:
    """A block of a model under torch.utils.checkpoint."""
    return checkpoint(block, *given, use_reentrant=False)


@dataclass
class Step:
    """What is compiled: the loss of a batch."""

    module: Any
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


class Training:
    """A model, its optimizer, and a batch that stays the same."""

    def __init__(self, model: Step, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **of: float):
        self.module, self.x, self.y, self._loss = model.module, model.x, model.y, model.loss
        self._optimizer = optimizer(model.module.parameters(), **(of or {"lr": 1e-4}))
        self.stays = (
            4 * sum(parameter.nbytes for parameter in model.module.parameters()) + self.x.nbytes + self.y.nbytes
        )
        """Bytes of parameters, gradients, what the optimizer remembers, and the batch."""

    def step(self) -> Tensor:
        """One step; the loss."""
        self._optimizer.zero_grad()
        loss = self._loss(self.module(self.x), self.y)
        loss.backward()  # type: ignore[no-untyped-call]  # as it is in torch
        self._optimizer.step()
        return loss.detach()


# Models of any size


def _text(module: nn.Module, words: int, batch: int, length: int) -> Step:
    def loss(scores: Tensor, words: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten())

    x = torch.randint(words, (batch, length))
    return Step(module, x, x.roll(-1, 1), loss)


def _images(module: nn.Module, batch: int, size: int) -> Step:
    x, y = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Step(module, x, y, functional.cross_entropy)


def gpt2_of(run: Run, width: int, depth: int, length: int, batch: int, words: int) -> Step:
    module = Transformer(run, nn.Embedding(words, width), width, depth, length, words, causal=True)
    return _text(module, words, batch, length)


def _vit(run: Run, width: int, depth: int, size: int, patch: int, batch: int) -> Step:
    enter = nn.Conv2d(3, width, patch, patch)
    return _images(Transformer(run, enter, width, depth, (size // patch) ** 2, 10, causal=False), batch, size)


def _resnet(run: Run, channels: int, counts: Sequence[int], size: int, batch: int, *kind: type[Residual]) -> Step:
    return _images(ResNet(run, channels, counts, *kind), batch, size)


def _unet(run: Run, channels: int, levels: int, size: int, batch: int) -> Step:
    x = torch.randn(batch, 3, size, size)
    target = (x.sum(1, keepdim=True) > 0).float()
    return Step(UNet(run, channels, levels), x, target, functional.binary_cross_entropy_with_logits)


def _lstm(run: Run, words: int, width: int, batch: int, length: int) -> Step:
    return _text(Lstm(run, words, width, 8), words, batch, length)


def llama(run: Run, layers: int, length: int, dropout: float) -> Step:
    return _text(Llama(run, 1_000, 128, layers, 4, 344, length, dropout), 1_000, 2, length)


def bert(run: Run, layers: int, length: int, dropout: float) -> Step:
    return _text(Bert(run, 1_000, 192, layers, 3, 768, length, dropout), 1_000, 2, length)


@dataclass(frozen=True)
class Sized:
    """A model at two sizes."""

    title: str
    of: Callable[..., Step]
    small: tuple[Any, ...]
    """Only to check that it runs."""
    whole: tuple[Any, ...]

    def __call__(self, run: Run, small: bool) -> Step:
        return self.of(run, *(self.small if small else self.whole))


TO_TRAIN: Final = {
    "gpt2": Sized(
        "GPT-2, 6 blocks of width 384, 4 x 512 tokens, AdamW", gpt2_of, (64, 2, 32, 2, 100), (384, 6, 512, 4, 8_000)
    ),
    "resnet": Sized(
        "ResNet-18, 16 images of 160 x 160, AdamW", _resnet, (8, (1, 1, 1, 1), 32, 2), (64, (2, 2, 2, 2), 160, 16)
    ),
    "unet": Sized(
        "U-Net, 4 levels from 16 channels, 8 pictures of 160 x 160, AdamW", _unet, (4, 2, 32, 2), (16, 4, 160, 8)
    ),
    "vit": Sized(
        "ViT, 8 blocks of width 256, 16 images of 160 x 160 in patches of 10, AdamW",
        *(_vit, (64, 2, 40, 10, 2), (256, 8, 160, 10, 16)),
    ),
}
"""At realistic sizes."""

TO_COMPILE: Final = {
    "resnet18": Sized(
        "ResNet-18, 8 images of 112 x 112", _resnet, (8, (1, 1, 1, 1), 32, 2), (64, (2, 2, 2, 2), 112, 8)
    ),
    "resnet50": Sized(
        "ResNet-50, 4 images of 112 x 112",
        *(_resnet, (4, (3, 4, 6, 3), 32, 2, Bottleneck), (64, (3, 4, 6, 3), 112, 4, Bottleneck)),
    ),
    "unet": Sized("U-Net, 4 levels from 16 channels, 4 pictures of 96 x 96", _unet, (4, 2, 32, 2), (16, 4, 96, 4)),
    "gpt2": Sized(
        "GPT-2, 6 blocks of width 256, 4 x 256 tokens of 2,000", gpt2_of, (64, 2, 32, 2, 100), (256, 6, 256, 4, 2_000)
    ),
    "vit": Sized(
        "ViT, 8 blocks of width 192, 8 images of 112 x 112 in patches of 8",
        *(_vit, (64, 2, 32, 8, 2), (192, 8, 112, 8, 8)),
    ),
    "lstm": Sized(
        "LSTM of width 256, 32 x 48 tokens of 1,000, blocks of 8 steps", _lstm, (50, 16, 2, 16), (1_000, 256, 32, 48)
    ),
}
"""At sizes that are compiled in seconds."""
