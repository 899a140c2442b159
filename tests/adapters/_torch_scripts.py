"""What training scripts do, each as a function that gives tensors and other values: run plainly, and under eviction."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _torch_operators import Evicting
from torch import nn

import recompute as rc
import recompute_torch as rt

Script = Callable[[], Sequence[Any]]


def network(dropout: float = 0.1, width: int = 8, depth: int = 2) -> nn.Sequential:
    """Linear layers with batch norm, activations in place and dropout."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


def left_in(module: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and gradients."""
    return [
        *module.state_dict().values(),
        *(parameter.grad for parameter in module.parameters() if parameter.grad is not None),
    ]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, rows: int = 4) -> list[torch.Tensor]:
    """The losses of a few steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(rows, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def run(script: Script) -> list[Any]:
    """What it gives, in plain torch; the generator afterwards belongs to it."""
    torch.manual_seed(1)
    return [*script(), torch.get_rng_state()]


def run_evicting(script: Script) -> tuple[list[Any], rc.Stats]:
    """What it gives in a block where everything is evicted after each operator."""
    with rt.budget() as block, Evicting(block):
        found = run(script)
        stats = block.stats()
    return found, stats


def check(script: Script, least: int = 1) -> None:
    """It gives the same to the last bit, with as many repeated operators at least."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        expected = run(script)
        found, stats = run_evicting(script)
    assert alike(expected, found) == []
    assert stats.rematerializations >= least


def alike(expected: Sequence[Any], found: Sequence[Any]) -> list[int]:
    """The places at which two results differ, in any bit."""
    assert len(expected) == len(found)
    return [at for at, (one, other) in enumerate(zip(expected, found, strict=True)) if not _same(one, other)]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    bits = [tensor.detach().to_dense() if tensor.is_sparse else tensor.detach() for tensor in (one, other)]
    if one.dtype != other.dtype or one.shape != other.shape or one.requires_grad != other.requires_grad:
        return False
    first, second = (bit.contiguous().reshape(-1).view(torch.uint8) for bit in bits)
    return torch.equal(first, second)
