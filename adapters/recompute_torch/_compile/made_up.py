"""Tensors instead of those that are not there while a graph is compiled: of the same shapes, with some content."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_UNKNOWN: Final = 64  # what a size counts as that depends on data


class Shape:
    """What a tensor is beyond its content."""

    def __init__(self, tensor: torch.Tensor, channels_last: bool) -> None:
        self.dtype, self.device = tensor.dtype, tensor.device
        self.size = [as_int(each) for each in tensor.shape]
        self.stride = [as_int(each) for each in tensor.stride()]
        if channels_last and len(self.size) == 4:
            _, channels, height, width = self.size
            self.stride = [channels * height * width, 1, width * channels, channels]

    @property
    def length(self) -> int:
        """Elements from the first to the last in memory."""
        ends = [(size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)]
        return 1 + sum(ends) if 0 not in self.size else 0

    @property
    def kind(self) -> Hashable:
        """What shapes have in common that can be in one piece of memory."""
        return self.dtype, self.device

    def memory(self) -> torch.Tensor:
        """One half everywhere, or zero: valid as an index, too."""
        content = 0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((self.length,), content, dtype=self.dtype, device=self.device)

    def make(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, in the memory that is given or in its own."""
        whole = self.memory() if memory is None else memory
        return whole.as_strided(self.size, self.stride)

    def __repr__(self) -> str:
        return f"{self.dtype}{self.size}{self.stride}{self.device}"


def hinted(arguments: Any, channels_last: bool = False) -> Any:
    """Shapes instead of tensors, and numbers in that of symbols."""

    def one(each: Any) -> Any:
        value = each.meta.get("val") if isinstance(each, fx.Node) else each
        if isinstance(value, torch.Tensor):
            return Shape(value, channels_last)
        return as_int(value) if isinstance(value, torch.SymInt) else value

    return tree_map(one, arguments, is_leaf=lambda each: isinstance(each, fx.Node))


def as_int(size: Any) -> int:
    """A size that may be a symbol."""
    return int(optimization_hint(size, fallback=_UNKNOWN))


def made_up(values: Sequence[Any], *, together: bool = False) -> list[Any]:
    """What can be given to kernels instead of values of a graph.

    `together`: floating-point tensors share memory.
    """
    shapes = [hinted(value) for value in values]
    longest: dict[Hashable, Shape] = {}
    for each in shapes:
        if together and isinstance(each, Shape) and each.dtype.is_floating_point:
            longest[each.kind] = max(longest.get(each.kind, each), each, key=lambda shape: shape.length)
    memory = {kind: shape.memory() for kind, shape in longest.items()}
    return [each.make(memory.get(each.kind)) if isinstance(each, Shape) else each for each in shapes]


@contextmanager
def elsewhere() -> Iterator[None]:
    """Outside of what is being traced; random numbers that are drawn here do not count."""
    with _disable_current_modes(), torch.no_grad(), drawing_elsewhere():
        yield


@contextmanager
def drawing_elsewhere() -> Iterator[None]:
    """Random numbers that are drawn here do not count."""
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(cuda):
        yield
