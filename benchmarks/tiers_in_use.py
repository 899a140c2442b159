"""What a disk tier gains for programs of the guides: seconds with and without one.

Newton-CG and inference with a fifth of their memory (docs/newton.md, docs/inference.md), and a transformer that PyTorch
trains, compared with `saved_tensors_hooks` that write to files. Each cell has the wall time (the least of two runs) and
its ratio to the time without a budget. In parentheses: the number of recomputed operations, then the megabytes written
and read. It takes about five minutes on two cores.

    python benchmarks/tiers_in_use.py [--into docs/results]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from _common import ROOT, arguments, facts, page, publish, say, section
from _torch_measures import files
from _ways import fastest
from torch.nn import functional

import recompute as rc
import recompute_torch as rt

sys.path.insert(0, str(ROOT / "docs" / "examples"))

import inference  # an example
import newton
from _torch_networks import Transformer

RUNS: Final = 2
STEPS: Final = 4


def cell(seconds: float, whole: float, stats: rc.Stats) -> str:
    moved = "".join(f", {tier.written / 1e6:.0f}, {tier.read / 1e6:.0f} MB" for tier in stats.tiers)
    return f"{seconds:.2f} s, x {seconds / whole:.2f} ({stats.rematerializations:,}{moved})"


def arrays(folder: str) -> str:
    lines = []
    problem = newton.load()
    pictures = inference.spoil(inference.load())
    weights = inference.learn(pictures)
    programs: dict[str, Callable[[], Any]] = {
        "Newton-CG": lambda: newton.digests(newton.fit(problem, 6)[0]),
        "inference": lambda: inference.ask(inference.make(*rc.array((weights, list(pictures))))),
    }
    for name, program in programs.items():
        whole, expected, stats = fastest(program, rc.Cache, RUNS)
        budget = stats.peak // 5
        cells = [f"{whole:.2f} s, {stats.peak / 1e6:.0f} MB"]
        for tiers in ((), (rc.Disk(folder=folder),), (rc.Disk(folder=folder, bandwidth="200MB"),)):
            seconds, found, stats = fastest(program, partial(rc.Cache, budget, tiers=tiers), RUNS)
            assert found == expected
            cells.append(cell(seconds, whole, stats))
            say(f"{name}: {cells[-1]}")
        lines.append((name, *cells))
    head = ("", "no budget", "20 %, no disk", "20 %, a disk", "20 %, a disk of 200 MB/s")
    return section("NumPy programs in a fifth of their memory", "", head, lines)


def trained() -> tuple[list[float], list[torch.Tensor], int]:
    """A few steps: losses, parameters, and the bytes of parameters, gradients and the optimizer's memory."""
    torch.manual_seed(0)
    module = Transformer(6, 256, 4, 256, 128)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, foreach=False)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(256, (8, 129))
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # as it is in torch
        optimizer.step()
        losses.append(loss.detach())
    parameters = list(module.parameters())
    return [float(loss) for loss in losses], parameters, 4 * sum(parameter.nbytes for parameter in parameters)


def training(folder: str) -> str:
    torch.set_num_threads(1)
    whole, (losses, parameters, floor), _ = fastest(trained, nullcontext, RUNS)
    peak = fastest(trained, rt.budget, RUNS)[2]
    weights = sum(parameter.numel() for parameter in parameters) / 1e6
    lines = [("plain", f"{peak.peak / 1e6:.0f} MB", f"{whole:.2f}, x 1.00", "")]
    seconds, _, _ = fastest(trained, partial(files, folder), RUNS)
    with rt.budget(native=False) as block, files(folder):
        trained()
        most = block.stats().peak
    told = f"{seconds:.2f}, x {seconds / whole:.2f}"
    lines.append(("`saved_tensors_hooks`, to files", f"{most / 1e6:.0f} MB", told, ""))
    say(f"hooks: {most / 1e6:.0f} MB, {seconds / whole:.2f}")
    for budget, tiers in (
        (most, ()),
        (most, (rc.Disk(folder=folder),)),
        (floor * 3 // 4, (rc.Disk(folder=folder),)),
        (floor // 2, (rc.Disk(folder=folder),)),
    ):
        how = "`rt.budget`" + (" and a disk" if tiers else "")
        try:
            seconds, found, stats = fastest(trained, partial(rt.budget, budget, tiers=tiers, foresight=False), RUNS)
        except rc.BudgetError as error:
            lines.append((how, f"{budget / 1e6:.0f} MB", "does not fit", str(error)))
            continue
        assert found[0] == losses
        assert all(torch.equal(one, other) for one, other in zip(found[1], parameters, strict=True))
        text = cell(seconds, whole, stats)
        say(f"{how} {budget / 1e6:.0f} MB: {text}")
        lines.append((how, f"{stats.peak / 1e6:.0f} MB", text, "bit-identical"))
    what = (
        f"A transformer of {weights:.1f} million weights, {STEPS} steps with AdamW (`foreach=False`), one thread. Its "
        f"parameters, their gradients and the optimizer's state take {floor / 1e6:.0f} MB; a budget below that needs a "
        'tier. "Counted" is the peak of the bytes in the storages of tensors.'
    )
    return section("Training with PyTorch", what, ("", "counted", "seconds", ""), lines)


def main() -> None:
    options = arguments(__doc__).parse_args()
    machine = facts("torch")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        parts = arrays(folder), training(folder)
    publish(options.into, "tiers-in-use", page("Tiers in use", __doc__, *parts, machine=machine))


if __name__ == "__main__":
    main()
