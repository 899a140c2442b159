"""Measures what a block without memory pressure costs: whole training steps, and single operators.

`python benchmarks/torch_overhead.py --into docs/results` writes torch_overhead.md there. In turns: plain torch, a
dispatch mode that only passes calls on (the floor of everything that is made in Python), a block without a limit, and
one with a budget that is never reached. Steps are those of two trainings; bursts are 100 calls on tensors with 16
elements. The least is the figure, in seconds of the processor: others on the machine make it no larger.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import process_time
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import MICRO, facts, markdown, say
from _torch_sizes_models import Training, gpt2_of, straight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import recompute_torch as rt

sys.path.append(str(Path(__file__).resolve().parent.parent / "docs" / "examples"))

from _torch_training import treelstm  # it lies in the examples

ROUNDS: Final = 12
"""In each of these a training starts again in every variant."""
STEPS: Final = 4
BURSTS: Final = 200
CALLS: Final = 100


class Passing(TorchDispatchMode):
    """Does nothing itself but count."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
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


def _gpt2() -> Callable[[], Any]:
    training: Training = gpt2_of(straight, width=256, depth=3, length=64, batch=2, words=1_000)
    return training.step


def _treelstm() -> Callable[[], Any]:
    step = treelstm(128, 20, 96).step

    def same_tree() -> Any:
        torch.manual_seed(3)
        return step()

    return same_tree


TRAININGS: Final[dict[str, Callable[[], Callable[[], Any]]]] = {
    "GPT-2, 3 blocks of width 256, 2 x 64 tokens, AdamW": _gpt2,
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
                step = begin()
                with way():
                    for _ in range(2):
                        step()
                    for _ in range(STEPS):
                        began = process_time()
                        step()
                        best[name] = min(best[name], process_time() - began)
        say(f"{what}: {best}")
        found.append({"what": what, "operators": counting.operators} | best)
    return found


def page(trainings: list[dict[str, Any]], bursts: list[dict[str, Any]], machine: dict[str, str]) -> str:
    """Ratios first: to plain torch, and to the mode that only passes on."""
    ratios = [
        (
            f"{each['what']}: {each['operators']} operators",
            f"{each['plain'] / MICRO / each['operators']:.1f}",
            *(f"{each[name] / each['plain']:.2f}" for name in ("mode", "free", "large")),
            *(f"{each[name] / each['mode']:.2f}" for name in ("free", "large")),
        )
        for each in trainings
    ]
    return "\n\n".join(
        [
            "# PyTorch: what a block costs without pressure",
            "Made by `python benchmarks/torch_overhead.py --into docs/results`, in one run on one thread. `mode` is a "
            "dispatch mode that only passes calls on, `free` a block without a limit, `large` one with a budget that "
            "is never reached. The least of many runs, taken in turns, in processor seconds.",
            "## Steps",
            "Goals: at most 1.25 times the mode without a limit, 1.5 times with a budget; the TreeLSTM at most twice "
            "plain torch without a limit.",
            markdown(
                ("", "plain, us an operator", "mode / plain", "free / plain", "large / plain", "free / mode",
                 "large / mode"), ratios
            ),
            "## Operators",
            "Microseconds of one call on 16 elements.",
            markdown(
                ("", "plain", "mode", "free", "large"),
                [(each["what"], *(f"{each[name]:.1f}" for name in WAYS)) for each in bursts],
            ),
            "## Machine",
            markdown(("", "", ""), [(name, value, "") for name, value in machine.items()]),
        ]
    ) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--into", metavar="FOLDER", type=Path, help="write torch_overhead.md there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts() | {"torch": torch.__version__, "threads": "1"}
    text = page(steps(), overheads(), machine)
    if options.into:
        (options.into / "torch_overhead.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
