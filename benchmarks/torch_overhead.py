"""What a block without memory pressure costs: whole training steps, and single operators.

`plain` is PyTorch by itself, `mode` an empty dispatch mode, which only passes calls on (the least that anything written
in Python costs), `free` a block without a limit, and `large` a block with a budget that is never reached, both on the
Python path; `native` is the same on the native path, which must be built. Steps are those of two models, timed in
turns; a burst is 100 calls on tensors with 16 elements. Then come steps of five models within shares of their peak.
Times are CPU time on one thread, the least of many runs, which other work on the machine hardly affects. Those within
shares are medians: each is divided by that of a training in plain torch just before.

`python benchmarks/torch_overhead.py --into docs/results` writes torch_overhead.md there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import process_time
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import MICRO, ROOT, arguments, facts, page, publish, say, section
from _torch_models import Step, Training, gpt2_of, straight
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recompute as rc
import recompute_torch as rt

sys.path.append(str(ROOT / "docs" / "examples"))

from _torch_training import treelstm  # it lies in the examples

ROUNDS: Final = 12
"""In each round the training starts again in every variant."""
PAIRS: Final = 7
"""Trainings in plain torch, each followed by one in every budget."""
STEPS: Final = 4
BURSTS: Final = 200
CALLS: Final = 100
SHARES: Final = (None, 0.9, 0.7, 0.5)
"""Of the peak of each path without a limit: the native one also counts what kernels take."""


class Passing(TorchDispatchMode):
    """Does nothing itself but count."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


_BIAS: Final = torch.ones(4)
_WEIGHT: Final = torch.eye(4)

WHAT: Final[dict[str, tuple[Callable[[Tensor], Tensor], int]]] = {
    "neg": (lambda x: x.neg(), 1),
    "add": (lambda x: x + x, 1),
    "multiply by a number": (lambda x: x * 0.5, 1),
    "mul_ in place": (lambda x: x.mul_(1.0), 1),
    "view": (lambda x: x.view(16), 1),
    "addmm and two views": (lambda x: torch.addmm(_BIAS, x.view(4, 4), _WEIGHT).view(16), 3),
}
"""Each with the number of operators."""

WAYS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "plain": nullcontext,
    "mode": Passing,
    "free": lambda: rt.budget(native=False),
    "large": lambda: rt.budget("100GB", native=False),
    "native free": lambda: rt.budget(native=True),
    "native large": lambda: rt.budget("100GB", native=True),
}


def burst(function: Callable[[Tensor], Tensor], way: Callable[[], AbstractContextManager[Any]]) -> float:
    """Seconds of one call, each on the result of the one before."""
    with way():
        x = torch.ones(16) * 1
        for _ in range(5):
            x = function(x)
        began = process_time()
        for _ in range(CALLS):
            x = function(x)
        return (process_time() - began) / CALLS


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


def _treelstm() -> Callable[[], Any]:
    step = treelstm(128, 20, 96).step

    def same_tree() -> Any:
        torch.manual_seed(3)
        return step()

    return same_tree


class Tree(nn.Module):
    """A TreeLSTM over a binary tree, one linear layer a node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)

    def forward(self, leaves: Tensor) -> Tensor:
        nodes = [(leaf, leaf) for leaf in leaves]
        while len(nodes) > 1:
            nodes = [self.join(*pair) for pair in zip(nodes[::2], nodes[1::2], strict=True)]
        return nodes[0][0]

    def join(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, o, u, f, g = self.gates(torch.cat([one[0], other[0]], 1)).chunk(5, 1)
        cell = i.sigmoid() * u.tanh() + f.sigmoid() * one[1] + g.sigmoid() * other[1]
        return o.sigmoid() * cell.tanh(), cell


def _binary_tree() -> Callable[[], Any]:
    torch.manual_seed(0)
    return Training(Step(Tree(64), torch.randn(32, 32, 64), torch.empty(0), _squares), torch.optim.SGD, lr=0.05).step


class Cells(nn.Module):
    """An LSTM, one call a cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = state = torch.zeros_like(inputs[0])
        for x in inputs:
            hidden, state = self.cell(x, (hidden, state))
        return hidden


def _lstm() -> Callable[[], Any]:
    torch.manual_seed(0)
    return Training(Step(Cells(128), torch.randn(32, 32, 128), torch.empty(0), _squares), torch.optim.SGD, lr=0.05).step


def _mlp() -> Callable[[], Any]:
    torch.manual_seed(0)
    module = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.ReLU())])
    x = torch.randn(1024, 128)
    loss = lambda found, x: (found - x).square().mean()
    return Training(Step(module, x, x, loss), torch.optim.Adam, lr=1e-3).step


def _cnn() -> Callable[[], Any]:
    torch.manual_seed(0)
    block = lambda: (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    module = nn.Sequential(*[layer for _ in range(6) for layer in block()])
    return Training(Step(module, torch.randn(8, 16, 16, 16), torch.empty(0), _squares), torch.optim.SGD, lr=0.01).step


def _squares(found: Tensor, _: Tensor) -> Tensor:
    return found.square().mean()


def _gpt2(*sizes: int) -> Callable[[], Any]:
    return Training(gpt2_of(straight, *sizes)).step


WITHIN: Final[dict[str, Callable[[], Callable[[], Any]]]] = {
    "TreeLSTM, binary, 32 leaves of 32 x 64, SGD": _binary_tree,
    "MLP, 8 layers of width 128, batch 1024, Adam": _mlp,
    "LSTM, 32 cells of 32 x 128, SGD": _lstm,
    "CNN, 6 layers of 16 channels, 8 images of 16 x 16, SGD": _cnn,
    "GPT-2, 6 blocks of width 384, 24 x 64 tokens, AdamW": lambda: _gpt2(384, 6, 64, 24, 1_000),
}
"""Each begins a training, of which it gives the step."""

TRAININGS: Final[dict[str, Callable[[], Callable[[], Any]]]] = {
    "GPT-2, 3 blocks of width 256, 2 x 64 tokens, AdamW": lambda: _gpt2(256, 3, 64, 2, 1_000),
    "TreeLSTM, 20 leaves, width 96, batch 128, Adagrad": _treelstm,
}
"""Each begins a training, of which it gives the step."""


def steps() -> list[dict[str, Any]]:
    """Seconds of the processor of a step, of each training in each way, and how many operators it has."""
    found = []
    for what, begin in TRAININGS.items():
        best = dict.fromkeys(WAYS, float("inf"))
        step = begin()
        step()
        with Passing() as counting:
            step()
        for _ in range(ROUNDS):
            for name, way in WAYS.items():
                best[name] = min(best[name], timed(begin, way()))
        say(f"{what}: {best}")
        found.append({"what": what, "operators": counting.operators} | best)
    return found


def within() -> list[dict[str, Any]]:
    """Times plain torch, of the steps of each training on each path within each share of its peak."""
    found = []
    for what, begin in WITHIN.items():
        budgets: dict[tuple[bool, float | None], int | None] = {}
        for native in (False, True):
            step = begin()
            with rt.budget(native=native) as block:
                for _ in range(2):
                    step()
                peak = block.stats().peak
            budgets |= {(native, share): None if share is None else int(share * peak) for share in SHARES}
        times: dict[Any, list[float]] = {way: [] for way in budgets}
        plain: list[float] = []
        repeated = dict.fromkeys(budgets, 0.0)
        for _ in range(PAIRS if not what.startswith("GPT-2") else 1):  # its steps take seconds
            plain.append(timed(begin, nullcontext()))
            for way, budget in budgets.items():
                try:
                    block = rt.budget(budget, native=way[0])
                    times[way].append(timed(begin, block) / plain[-1])
                    repeated[way] = block.stats().rematerializations / (2 + STEPS)
                except rc.BudgetError:
                    times[way].append(float("nan"))
        ratios = {way: median(of) for way, of in times.items()}
        say(f"{what}: {min(plain)} {ratios}")
        for native in (False, True):
            row = {share: (ratios[native, share], repeated[native, share]) for share in SHARES}
            found.append({"what": what, "path": "native" if native else "Python", "plain": min(plain)} | row)
    return found


def timed(begin: Callable[[], Callable[[], Any]], way: AbstractContextManager[Any]) -> float:
    """Seconds of the processor of the fastest of some steps."""
    step = begin()
    best = float("inf")
    with way:
        for _ in range(2):
            step()
        for _ in range(STEPS):
            began = process_time()
            step()
            best = min(best, process_time() - began)
    return best


def parts(trainings: list[dict[str, Any]], budgets: list[dict[str, Any]], bursts: list[dict[str, Any]]) -> list[str]:
    """Ratios first: to plain torch, and to the mode that only passes on."""
    ratios = [
        (
            f"{training['what']}: {training['operators']} operators",
            f"{training['plain'] / MICRO / training['operators']:.1f}",
            *(f"{training[name] / training['plain']:.2f}" for name in list(WAYS)[1:]),
            *(f"{training[name] / training['mode']:.2f}" for name in ("free", "large")),
        )
        for training in trainings
    ]
    operators = [(burst["what"], *(f"{burst[name]:.1f}" for name in WAYS)) for burst in bursts]
    return [
        section(
            "Steps",
            "The goals: `free` takes at most 1.25 times as long as `mode`, `large` at most 1.5 times; on the TreeLSTM, "
            "`free` takes at most twice as long as `plain`.",
            " | plain, us per operator | mode / plain | free / plain | large / plain | native free / plain | "
            "native large / plain | free / mode | large / mode",
            ratios,
        ),
        section(
            "Steps within a budget",
            "Times plain torch just before, and in brackets how many operators ran again in a step. A share is one of "
            "the peak without a limit on the same path; the native one counts what kernels take while they run, too. "
            "`-`: less than what must be in memory together.",
            ("", "plain, ms", "path", *map(_share, SHARES)),
            [_row(budget) for budget in budgets],
        ),
        section("Operators", "Microseconds per call, on tensors with 16 elements.", ("", *WAYS), operators),
    ]


def _share(share: float | None) -> str:
    return "no limit" if share is None else f"{share:.0%}"


def _row(found: dict[Any, Any]) -> tuple[str, ...]:
    cells = [found[share] for share in SHARES]
    shown = ["-" if times != times else f"{times:.2f} ({again:.0f})" for times, again in cells]
    return (found["what"], f"{found['plain'] * 1e3:.1f}", found["path"], *shown)


def main() -> None:
    options = arguments(__doc__, into=None).parse_args()
    torch.set_num_threads(1)
    machine = facts("torch", threads="1")
    title = "PyTorch: what a block costs without memory pressure"
    text = page(title, __doc__, *parts(steps(), within(), overheads()), machine=machine)
    publish(options.into, "torch_overhead", text)


if __name__ == "__main__":
    main()
