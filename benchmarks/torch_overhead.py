"""Measures what an operator call costs in a block without memory pressure: `python benchmarks/torch_overhead.py`.

Bursts of 100 calls on tensors with 16 elements, in turns: in plain torch, in a dispatch mode that only passes calls on
(the floor of everything that is made in Python), in a block without a limit, and in one with a budget that is never
reached. The least burst is the figure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import MICRO, markdown
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import recompute_torch as rt

BURSTS: Final = 200
CALLS: Final = 100


class Passing(TorchDispatchMode):
    """Does nothing itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def unary(x: Tensor) -> Tensor:
    return x.neg()


def binary(x: Tensor) -> Tensor:
    return x + x


def scalar(x: Tensor) -> Tensor:
    return x * 0.5


def in_place(x: Tensor) -> Tensor:
    return x.mul_(1.0)


def view(x: Tensor) -> Tensor:
    return x.view(16)


def linear(x: Tensor) -> Tensor:
    return torch.addmm(_BIAS, x.view(4, 4), _WEIGHT).view(16)


_BIAS: Final = torch.ones(4)
_WEIGHT: Final = torch.eye(4)

WHAT: Final[dict[str, tuple[Callable[[Tensor], Tensor], int]]] = {
    "neg": (unary, 1),
    "add": (binary, 1),
    "multiply by a number": (scalar, 1),
    "mul_ in place": (in_place, 1),
    "view": (view, 1),
    "addmm and two views": (linear, 3),
}
"""Each with the number of operators."""

WAYS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "plain": nullcontext,
    "mode": Passing,
    "free": rt.budget,
    "large": lambda: rt.budget("100GB"),
}


def burst(function: Callable[[Tensor], Tensor], way: Callable[[], AbstractContextManager[Any]]) -> float:
    """Seconds of one call, each on the result of the one before."""
    with way():
        x = torch.ones(16) * 1
        for _ in range(5):
            x = function(x)
        began = perf_counter()
        for _ in range(CALLS):
            x = function(x)
        return (perf_counter() - began) / CALLS


def overheads() -> list[dict[str, Any]]:
    """Microseconds an operator, of each function in each way."""
    found = []
    for what, (function, operators) in WHAT.items():
        best = dict.fromkeys(WAYS, float("inf"))
        for _ in range(BURSTS):
            for name, way in WAYS.items():
                best[name] = min(best[name], burst(function, way))
        found.append({"what": what} | {name: least / operators / MICRO for name, least in best.items()})
    return found


if __name__ == "__main__":
    print(
        markdown(
            ("", *WAYS, ""),
            [(each["what"], *(f"{each[name]:.1f}" for name in WAYS), "us") for each in overheads()],
        )
    )
