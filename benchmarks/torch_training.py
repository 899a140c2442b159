"""Measures trainings in a memory budget on the models of the DTR paper, beside other ways to save memory.

`python benchmarks/torch_training.py --into docs/results` writes torch.md and torch.json there; `--models resnet,lstm`
chooses; `--picture docs/pictures/residency-torch.png` draws. Each model is trained for a few steps in plain torch, in a
block without a limit, and within shares of the peak that this one had; then with `torch.utils.checkpoint` around each
block and with saved tensors on disk, beside a budget of as many bytes. Batches and depths grow until a fixed budget is
too small. Blocks are native. One thread; times are of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import facts, say
from _torch_measures import Make, Reference, Taken, begin, files, fits, peak, reference, timed, within
from _torch_page import MOST, SHARES, page
from _torch_recording import recorded
from torch.utils.checkpoint import checkpoint

from _torch_training import gan, lstm, resnet, transformer, treelstm, unet

STEPS: Final = 3
PATIENCE: Final = 30  # times plain torch: with more, a run is given up
FACTORS: Final = (1.5, 2, 2.5, 3, 4, 5, 6, 8)

MODELS: Final[dict[str, tuple[str, Make]]] = {
    "resnet": (
        "ResNet with batch norm, 10 residual blocks, 16 images of 32 x 32, SGD with momentum",
        lambda: resnet(16, 10, 16, 32),
    ),
    "unet": ("U-Net, 3 levels, 8 pictures of 64 x 64, Adam (foreach)", lambda: unet(8, 3, 8, 64)),
    "transformer": (
        "transformer with dropout, 6 blocks of width 96, 16 x 64 tokens, autocast to bfloat16, AdamW (fused)",
        lambda: transformer(16, 6, 96, 4, 64),
    ),
    "lstm": ("LSTM classifier, 6 layers of width 64, 32 x 64 tokens, Adam", lambda: lstm(32, 64, 64, 6)),
    "treelstm": (
        "TreeLSTM, another tree with 20 leaves in each step, width 96, batch 128, Adagrad",
        lambda: treelstm(128, 20, 96),
    ),
    "gan": ("GAN, 8 unrolled steps, width 128, batch 1,024, Adam", lambda: gan(1024, 128, 8)),
}  # fmt: skip

BLOCKS: Final[dict[str, Callable[..., Make]]] = {
    "resnet": lambda run: lambda: resnet(16, 10, 16, 32, run),
    "unet": lambda run: lambda: unet(8, 3, 8, 64, run),
    "transformer": lambda run: lambda: transformer(16, 6, 96, 4, 64, run),
}
"""Those that have blocks, which another function runs."""

GROWING: Final[dict[str, tuple[str, int, Callable[[int], Make]]]] = {
    "batch, ResNet": ("images", 8, lambda size: lambda: resnet(size, 6, 16, 24)),
    "depth, ResNet": ("blocks", 6, lambda size: lambda: resnet(8, size, 16, 24)),
    "batch, transformer": ("sequences", 8, lambda size: lambda: transformer(size, 3, 64, 2, 64)),
    "depth, transformer": ("blocks", 3, lambda size: lambda: transformer(8, size, 64, 2, 64)),
    "batch, U-Net": ("pictures", 4, lambda size: lambda: unet(size, 2, 8, 48)),
    "batch, LSTM": ("texts", 16, lambda size: lambda: lstm(size, 48, 32, 4)),
    "batch, GAN": ("points", 256, lambda size: lambda: gan(size, 64, 4)),
}
"""A size that grows, the one whose peak in plain torch is the budget, and the training of each size."""


def recomputing(block: Any, *given: Any) -> Any:
    """A block under torch.utils.checkpoint."""
    return checkpoint(block, *given, use_reentrant=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="some of these, separated by commas; %(default)s")
    parser.add_argument("--into", metavar="FOLDER", type=Path, help="write torch.md and torch.json there")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw a recorded step in half of its memory")
    parser.add_argument("--quick", action="store_true", help="only the budgets, to check that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts() | {"torch": torch.__version__, "threads": "1"}
    found: dict[str, Any] = {"machine": machine, "models": {}, "rivals": [], "growing": []}
    for name in options.models.split(","):
        what, make = MODELS[name]
        plain = reference(make, STEPS)
        runs = budgets(name, make, plain)
        found["models"][name] = {"what": what, "plain": {"seconds": plain.seconds, "allocated": plain.allocated}}
        found["models"][name]["runs"] = [asdict(run) for run in runs]
        if not options.quick:
            found["rivals"] += rivals(name, make, plain)
    if not options.quick:
        found["growing"] = [grown(name) for name in GROWING]
        found["recorded"] = recorded(lambda: resnet(8, 6, 8, 16), SHARES[1:], options.picture)
    text = page(found)
    if options.into:
        (options.into / "torch.md").write_text(text, encoding="utf-8")
        (options.into / "torch.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text)


# --- Shares of the peak -----------------------------------------------------------------------------------------------


def budgets(name: str, make: Make, plain: Reference) -> list[Taken]:
    """Without a limit, then within shares of what that took. Times are taken in two rounds: noise hits all alike."""
    runs = [within(make, None, plain, STEPS)]
    most = 5 + PATIENCE * STEPS * plain.seconds
    runs += [within(make, int(share * runs[0].peak), plain, STEPS, most) for share in SHARES]
    for run in runs:
        plain.seconds = min(plain.seconds, timed(begin(make), STEPS)[0])
        if not run.failed:
            again = within(make, run.budget, plain, STEPS, most)
            run.seconds = run.seconds if again.failed else min(run.seconds, again.seconds)
            run.same = run.same and again.same
    for run in runs:
        say(f"{name} {run.budget}: {run.failed or f'{run.again} again, {run.seconds / plain.seconds:.2f} times'}")
    return runs


# --- Other ways to save memory ----------------------------------------------------------------------------------------


def rivals(name: str, make: Make, plain: Reference) -> list[dict[str, Any]]:
    """Checkpoints and files, and a budget of as many bytes as each of these needed."""
    found = []
    if name in BLOCKS:
        found.append(rival(name, "torch.utils.checkpoint around each block", BLOCKS[name](recomputing), make, plain))
    with TemporaryDirectory() as folder:

        def saving() -> Any:
            task = make()
            step = task.step

            def stepped() -> torch.Tensor:
                with files(folder):
                    return step()

            return type(task)(task.modules, task.optimizers, stepped)

        if name != "gan":  # gradients of gradients go through the files again and again
            found.append(rival(name, "saved tensors in files", saving, make, plain))
    return found


def rival(name: str, how: str, other: Make, make: Make, plain: Reference) -> dict[str, Any]:
    budget = peak(other)
    seconds, _ = timed(begin(other), STEPS)
    ours = within(make, budget, plain, STEPS, 5 + PATIENCE * STEPS * plain.seconds)
    say(f"{name}, {how}: {seconds / plain.seconds:.2f} times; {ours.failed or f'{ours.seconds / plain.seconds:.2f}'}")
    return {
        "model": name, "how": how, "budget": budget, "ratio": seconds / plain.seconds,
        "ours": asdict(ours), "our ratio": None if ours.failed else ours.seconds / plain.seconds,
    }  # fmt: skip


# --- What fits into a fixed budget ------------------------------------------------------------------------------------


def grown(name: str) -> dict[str, Any]:
    """The largest size that trains in the memory that plain torch needs for the first, with bearable recomputation."""
    unit, first, make = GROWING[name]
    budget = peak(make(first))
    largest, runs = first, []
    for factor in FACTORS:
        size = int(first * factor)
        plain, _ = timed(begin(make(size)), 3)
        took = fits(make(size), budget, 5 + PATIENCE * plain)
        if took is None or took.overhead > MOST:
            break
        largest = size
        runs.append(
            {
                "size": size,
                "needs": peak(make(size)),
                "again": took.again,
                "overhead": took.overhead,
                "ratio": took.seconds / plain,
            }
        )
    say(f"{name}: {first} to {largest} {unit} in {budget / 1e6:.2f} MB")
    return {"name": name, "unit": unit, "budget": budget, "plain": first, "ours": largest, "runs": runs}


if __name__ == "__main__":
    main()
