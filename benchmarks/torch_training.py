"""Trainings in a memory budget, on models of the DTR paper at sizes that suit a CPU, and other ways to save memory.

Each model is trained for a few steps in plain torch, in a block without a limit, and within shares of the peak that
this one had; then with `torch.utils.checkpoint` around each block and with saved tensors on disk, beside a budget of as
many bytes. Batches and depths grow until a fixed budget is too small. Blocks are native. One thread; nothing here was
measured on a GPU.

*Peak* is the most that torch's allocator had given out: parameters, gradients, the optimizer's state, inputs,
activations, and what kernels need while they run, such as a convolution's scratch memory. Blocks count it themselves;
for all else torch's own profiler says it. The budget limits it. *Recomputed* is the number of repeated operator calls
in all steps of the run. *Time* is CPU time for one step, the least of four, as a ratio to plain torch. *Bits* says
whether losses, parameters and buffers equal those of plain torch.

`python benchmarks/torch_training.py --into docs/results` writes torch.md and torch.json there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import arguments, facts, page, publish, say, section
from _torch_measures import Make, Reference, Taken, begin, files, peak, reference, timed, within
from _torch_models import checkpointed

import recompute_torch as rt
from _torch_training import Task, gan, lstm, resnet, transformer, treelstm, unet
from recompute import pictures
from recompute.events import Event
from recompute.simulator import baseline, simulate
from recompute.traces import read

MEGA: Final = 1e6
SHARES: Final = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
MOST: Final = 3.0  # times the compute without eviction: with more, a batch or a depth does not count as fitting
STEPS: Final = 3
PATIENCE: Final = 30  # times plain torch: with more, a run is given up
FACTORS: Final = (1.5, 2, 2.5, 3, 4, 5, 6, 8)

MODELS: Final[dict[str, tuple[str, Callable[..., Task]]]] = {
    "resnet": (
        "ResNet with batch norm, 10 residual blocks, 16 images of 32 x 32, SGD with momentum",
        lambda *run: resnet(16, 10, 16, 32, *run),
    ),
    "unet": ("U-Net, 3 levels, 8 pictures of 64 x 64, Adam (foreach)", lambda *run: unet(8, 3, 8, 64, *run)),
    "transformer": (
        "transformer with dropout, 6 blocks of width 96, 16 x 64 tokens, autocast to bfloat16, AdamW (fused)",
        lambda *run: transformer(16, 6, 96, 4, 64, *run),
    ),
    "lstm": ("LSTM classifier, 6 layers of width 64, 32 x 64 tokens, Adam", lambda: lstm(32, 64, 64, 6)),
    "treelstm": (
        "TreeLSTM, another tree with 20 leaves in each step, width 96, batch 128, Adagrad",
        lambda: treelstm(128, 20, 96),
    ),
    "gan": ("GAN, 8 unrolled steps, width 128, batch 1,024, Adam", lambda: gan(1024, 128, 8)),
}
BLOCKS: Final = ("resnet", "unet", "transformer")
"""Those that have blocks, which another function may run."""

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


def main() -> None:
    parser = arguments(__doc__, into=None)
    parser.add_argument("--models", default=",".join(MODELS), help="some of these, separated by commas; %(default)s")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw a recorded step in half of its memory")
    parser.add_argument("--quick", action="store_true", help="only the budgets, to check that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts("torch", threads="1")
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
        found["recorded"] = recorded(lambda: resnet(8, 6, 8, 16), options.picture)
    text = page("PyTorch: training in a memory budget", __doc__, *parts(found), machine=machine)
    publish(options.into, "torch", text, found)


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


def rivals(name: str, make: Callable[..., Task], plain: Reference) -> list[dict[str, Any]]:
    """Checkpoints and files, and a budget of as many bytes as each of these needed."""
    found = []
    if name in BLOCKS:
        found.append(rival(name, "torch.utils.checkpoint around each block", partial(make, checkpointed), make, plain))
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
        took = within(make(size), budget, None, 3, 5 + PATIENCE * plain)
        if took.failed or took.overhead > MOST:
            break
        largest = size
        needs = peak(make(size))
        runs.append(
            {
                "size": size,
                "needs": needs,
                "again": took.again,
                "overhead": took.overhead,
                "ratio": took.seconds / plain,
            }
        )
    say(f"{name}: {first} to {largest} {unit} in {budget / 1e6:.2f} MB")
    return {"name": name, "unit": unit, "budget": budget, "plain": first, "ours": largest, "runs": runs}


# --- A recorded step --------------------------------------------------------------------------------------------------


def recorded(make: Make, picture: Path | None) -> dict[str, Any]:
    """The second step, recorded and replayed: then gradients and the optimizer's state are as in all that follow."""
    task = begin(make)
    task.step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.jsonl"
        with rt.budget(None, trace=path) as block:
            task.step()
            peak = block.stats().peak
        program = read(path)
        size = path.stat().st_size
    runs = [simulate(program, of_peak=share) for share in SHARES[1:]]
    if picture is not None:
        events: list[Event] = []
        half = simulate(program, of_peak=0.5, listener=events.append)
        title = f"a step of a ResNet in half of its memory, overhead {half.overhead or 0:.2f}"
        pictures.save(
            pictures.residency(events, title=title, budget=half.budget_bytes, least=0.001, unit=program.unit), picture
        )
    return {
        "operations": len(program.calls),
        "bytes": size,
        "peak": peak,
        "baseline": baseline(program),
        "runs": [{"share": share, "status": run.status, "again": run.rematerializations, "overhead": run.overhead}
                 for share, run in zip(SHARES[1:], runs, strict=True)],
    }  # fmt: skip


# --- The page ---------------------------------------------------------------------------------------------------------


def parts(found: dict[str, Any]) -> list[str]:
    """All of it but the machine."""
    return [goals(found), *map(budget_table, found["models"].values()), *others(found)]


def budget_table(model: dict[str, Any]) -> str:
    plain, runs = model["plain"], model["runs"]
    lines = [("plain torch", "", mega(plain["allocated"]), "", "1.00", "")]
    free = runs[0]
    for run, share in zip(runs, ("no limit", *(f"{share:.0%}" for share in SHARES)), strict=True):
        if run["failed"]:
            lines.append((share, mega(run["budget"]), "", "", "", run["failed"]))
            continue
        lines.append((
            share, mega(run["budget"]) if run["budget"] else "", mega(run["peak"]),
            f"{run['again']:,}", f"{run['seconds'] / plain['seconds']:.2f}", "equal" if run["same"] else "DIFFERENT",
        ))  # fmt: skip
    header = ("", "budget MB", "peak MB", f"recomputed, of {free['operations']:,}", "time", "bits")
    return section(model["what"], "", header, lines)


def mega(size: int | None) -> str:
    return "" if size is None else f"{size / MEGA:.2f}"


def goals(found: dict[str, Any]) -> str:
    runs = [run for model in found["models"].values() for run in model["runs"]]
    done = [run for run in runs if not run["failed"]]
    limited = [run for run in done if run["budget"]]
    over = [run for run in limited if run["peak"] > run["budget"]]
    most = max((run["peak"] / run["budget"] - 1 for run in over), default=0.0)
    lines = [
        f"Bits equal to plain torch: {sum(run['same'] for run in done)} of {len(done)} runs.",
        f"Peak within the budget: {len(limited) - len(over)} of {len(limited)} runs; at most {most:.0%} above it.",
        f"Budgets that did not fit or took too long: {len(runs) - len(done)}.",
    ]
    if found["growing"]:
        lines.append("Largest size in a fixed budget, as a multiple of the size that fits in plain torch: " + "; ".join(
            f"{row['name']} {row['ours'] / row['plain']:.1f}" for row in found["growing"]
        ) + ". The goal is 2.")  # fmt: skip
    return "## Goals\n\n" + "\n".join(f"* {line}" for line in lines)


def others(found: dict[str, Any]) -> list[str]:
    parts = []
    if found["rivals"]:
        lines = [
            (rival["model"], rival["how"], mega(rival["budget"]), f"{rival['ratio']:.2f}",
             rival["ours"]["failed"] or f"{rival['our ratio']:.2f}", str(rival["ours"]["again"]))
            for rival in found["rivals"]
        ]  # fmt: skip
        what = "The budget of `rt.budget` is the peak of the other way."
        header = "model | other way | peak MB | time | `rt.budget`: time | recomputed"
        parts.append(section("Compared with other ways to save memory", what, header, lines))
    if found["growing"]:
        lines = []
        for row in found["growing"]:
            last = row["runs"][-1] if row["runs"] else {"needs": row["budget"], "overhead": 1.0, "ratio": 1.0}
            lines.append((
                row["name"], mega(row["budget"]), f"{row['plain']} {row['unit']}", f"{row['ours']} {row['unit']}",
                f"{row['ours'] / row['plain']:.1f}", mega(last["needs"]), f"{last['overhead']:.2f}",
                f"{last['ratio']:.2f}",
            ))  # fmt: skip
        what = (
            "The budget is what plain torch needs for the size in the third column. Larger sizes, 1.5 to 8 times that, "
            f"were tried until one did not fit or took more than {MOST:.0f} times the compute without eviction. "
            '"Compute" is the overhead of the largest size that fits. "Time" is that of a step, divided by the time of '
            "plain torch with unlimited memory."
        )
        header = " | budget MB | plain torch | in the block | ratio | plain torch would need MB | compute | time"
        parts.append(section("The largest size that fits", what, header, lines))
    if found.get("recorded"):
        step = found["recorded"]
        lines = [
            (
                f"{run['share']:.0%}",
                run["status"],
                f"{run['again']:,}",
                f"{run['overhead'] or 0:.2f}" * bool(run["overhead"]),
            )
            for run in step["runs"]
        ]
        what = (
            f"One step of a ResNet ({step['operations']} operators) was recorded with `trace=`; the trace takes "
            f"{step['bytes'] / 1000:.0f} kB. The peak of the step is {mega(step['peak'])} MB, that of its replay "
            f"{mega(sum(step['baseline'].values()))} MB. The simulator's results for smaller budgets:"
        )
        parts.append(section("A recorded step", what, "budget | status | recomputed | overhead", lines))
    return parts


if __name__ == "__main__":
    main()
