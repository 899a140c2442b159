"""The published case of compiled steps with a budget: every row of a ladder, beside torch's own ratio.

The case of pytorch issue 197838, in a size that a CPU finishes in minutes: 32 layers, one thread. Lowering torch's
`activation_memory_budget` may raise the peak, and bounds nothing. `rt.compile` is given bytes, and is shown here with
every budget of a ladder, from the smallest on, operator by operator (`compiler="boxed"`, the default).

*peak* is what torch's allocator holds at most in addition to what there was before the step, gradients included;
*budget* counts the same. *FLOPs* are those of a step divided by those of `aot_eager` without a budget, by torch's
formulas. *time* is likewise; steps were timed in turns, and the fastest of some counts. *same bits*: loss and
gradients equal those of `aot_eager`. Budgets are tried from the smallest on, in one process.

Where inductor compiles (`--compiler inductor`), all of this is relative to plain inductor. All is compiled anew for
each row, with an empty cache: 32 layers take over an hour, and with dropout there are only 4. Operations inside of
kernels cannot be counted, and gradients need only be close.

Where it is chosen to recompute again at a late use: everywhere. A plan is an order of runs, in which an operator may
run any number of times; `rt.plans(step)` says how often each does.

*The floor*: gradients stay, so near the end of the backward pass nearly all of them, 26.4 MB, are in memory beside what
the attention of the first layer needs. In the first case that makes 27.9 MB; no schedule with less makes each gradient
once. Where attention is written as products and a softmax instead (248 MB at the peak in eager mode), the backward pass
of the softmax makes it 31.9 MB. There a plan was found for 32.2 MB, and an eager checkpoint per layer takes 34.4.

`python benchmarks/torch_budgets.py --into docs/results` writes torch_budgets.md there, torch_budgets.json, and
../pictures/torch-budgets.svg. Cases that are in torch_budgets.json stay on the page, and `--page` writes it again from
these figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the number of threads
from _common import arguments, facts, markdown, page, say, write
from _torch_models import Step, bert, checkpointed, llama
from _torch_modules import Run
from torch_compile import Bench, by, ours, ratio

RATIOS: Final = "0.05,0.1,0.15,0.2,0.3,0.5,0.75"
MODELS: Final[dict[str, tuple[str, Callable[..., Step]]]] = {
    "llama": ("Llama, {} layers of width 128, 4 heads, MLP 344, 2 x 256 tokens of 1,000", llama),
    "bert": ("BERT, {} layers of width 192, 3 heads, MLP 768, 2 x 256 tokens of 1,000", bert),
}
BACKENDS: Final = {"boxed": "aot_eager", "inductor": "inductor"}
EAGER, BLOCKS, BLOCKS_COMPILED = "eager", "eager, a checkpoint per layer", "compiled, the same"
CLOSE: Final = 1e-4
"""Gradients by inductor, relative to the largest of a tensor."""


def measure(
    make: Callable[[Run, bool], Step],
    quick: bool,
    budgets: int,
    ratios: Sequence[float],
    keep: Callable[[Bench], None],
    compiler: str,
) -> Bench:
    """Every way but for times; `keep` is called after each."""
    backend = BACKENDS[compiler]
    bench = Bench(make, quick, counts=compiler == "boxed")

    plain = bench.add(backend, by(backend))
    keep(bench)
    bench.add(EAGER)
    blocks = bench.add(BLOCKS, blocks=checkpointed)
    keep(bench)
    sizes = {max(1, round((0.05 + 0.95 * number / max(1, budgets - 1)) * plain.peak)) for number in range(budgets)}
    for size in sorted({*sizes, blocks.peak}):
        ours(bench, f"rt.compile, {size}", size, compiler)
        keep(bench)
    bench.add(BLOCKS_COMPILED, by(backend), blocks=checkpointed)
    keep(bench)
    for share in ratios:
        with ratio(share):
            bench.add(f"activation_memory_budget, {share}", by(backend))
        keep(bench)
    return bench


def rows(bench: Bench) -> list[dict[str, Any]]:
    """What is kept of ways."""
    names = ("name", "peak", "kept", "flops", "first", "same", "off", "failed", "note")
    kept = [{name: getattr(way, name) for name in names} for way in bench.ways]
    for row, way in zip(kept, bench.ways, strict=True):
        row["seconds"] = way.seconds if way.seconds < float("inf") else None
    return kept


def page_of(told: dict[str, Any]) -> str:
    """The figures of all cases, each with its machine."""
    parts = ["![peaks and operations by budget](../pictures/torch-budgets.svg)"]
    for case in told.values():
        parts.append(f"## {case['title']}")
        parts.append("\n".join(f"* {line}" for line in verdicts(case["rows"])))
        if case.get("remark"):
            parts.append(case["remark"])
        parts.append("\n".join(f"- {name}: {value}" for name, value in case["machine"].items()))
        parts.append(table(case["rows"]))
    return page("Every budget of the published case", __doc__, *parts)


def table(found: Sequence[dict[str, Any]]) -> str:
    plain = found[0]
    lines = []
    for row in found:
        mine = row["name"].startswith("rt.compile")
        given = float(row["name"].partition(", ")[2]) if mine else None
        told = ["**rt.compile**" if mine else row["name"], f"{given / 1e6:.1f}" if given else ""]
        if row["failed"]:
            lines.append([*told, "", "", "", "", "", row["failed"]])
            continue
        took = f"{row['seconds'] / plain['seconds']:.2f}" if row["seconds"] and plain["seconds"] else ""
        share = f"{row['peak'] / given:.3f}" if given else ""
        flops = f"{row['flops'] / plain['flops']:.4f}" if plain["flops"] else ""
        same = "yes" if row["same"] else "**no**" if plain["flops"] else f"within {row['off']:.0e}"
        lines.append([*told, f"{row['peak'] / 1e6:.1f}", share, flops, took, same, row["note"]])
    return markdown("way | budget, MB | peak, MB | peak / budget | FLOPs | time | same bits | note", lines)


def verdicts(found: Sequence[dict[str, Any]]) -> list[str]:
    """What the issue asks for, and what came of it."""
    mine = [row for row in found if row["name"].startswith("rt.compile")]
    fit = [row for row in mine if not row["failed"]]
    if not fit:
        return ["no budget was large enough"]
    asked = [float(row["name"].partition(", ")[2]) for row in fit]
    over = [row for row, budget in zip(fit, asked, strict=True) if row["peak"] > budget]
    told = [
        f"{len(fit)} of {len(mine)} budgets work, from {min(asked) / 1e6:.1f} MB on; the real peak is above the budget "
        f"in {len(over)} of them, and between {min(r['peak'] / a for r, a in zip(fit, asked, strict=True)):.3f} and "
        f"{max(r['peak'] / a for r, a in zip(fit, asked, strict=True)):.3f} times it.",
    ]
    if found[0]["flops"]:
        rising = [1 for less, more in pairwise(fit) if more["flops"] > less["flops"]]
        told.append(f"More memory takes more FLOPs in {len(rising)} of {len(fit) - 1} steps of the ladder.")
        told.append(f"Bits differ from those of aot_eager in {sum(not row['same'] for row in fit)} of {len(fit)} rows.")
    else:
        off = max(row["off"] for row in fit)
        told.append(f"Loss and gradients differ from those of plain inductor by at most {off:.0e} of the largest.")
        first = [row["first"] / found[0]["first"] for row in fit]
        told.append(
            f"The first call, which compiles and plans, takes {min(first):.2f} to {max(first):.2f} times as long as "
            "that of plain inductor; kernels are compiled anew each time."
        )
        told.append(f"A plan for more memory costs more, by its own account, in {dearer(fit)} of {len(fit) - 1} steps.")
    timed = [(less, more) for less, more in pairwise(fit) if less["seconds"] and more["seconds"]]
    if timed:
        slower = sum(more["seconds"] > 1.08 * less["seconds"] for less, more in timed)
        told.append(f"More memory takes more time, by more than 8 %, in {slower} of {len(timed)} steps of the ladder.")
    blocks = next((row for row in found if row["name"] == BLOCKS and not row["failed"]), None)
    equal = next((row for row, budget in zip(fit, asked, strict=True) if blocks and budget == blocks["peak"]), None)
    if blocks and equal:
        ratios = [f"{equal['flops'] / blocks['flops']:.3f} times its FLOPs"] if blocks["flops"] else []
        if equal["seconds"] and blocks["seconds"]:
            ratios.append(f"{equal['seconds'] / blocks['seconds']:.2f} times its time")
        told.append(f"At the peak of {BLOCKS}, {blocks['peak'] / 1e6:.1f} MB: {' and '.join(ratios)}.")
    theirs = [row for row in found if row["name"].startswith("activation") and not row["failed"]]
    if theirs:
        least = min(theirs, key=lambda row: row["peak"])
        rises = sum(less["peak"] > more["peak"] for less, more in pairwise(theirs))
        counted = bool(found[0]["flops"])
        wrong = sum(not row["same"] if counted else row["off"] > CLOSE for row in theirs)
        differ = "bits differ" if counted else f"gradients are off by more than {CLOSE:.0e}"
        told.append(
            f"Torch's ratio: the least peak is {least['peak'] / 1e6:.1f} MB, at {least['name'].partition(', ')[2]}; a "
            f"lower ratio has a higher peak in {rises} of {len(theirs) - 1} steps; {differ} in {wrong} of "
            f"{len(theirs)} rows."
        )
    return told


def dearer(rows: Sequence[dict[str, Any]]) -> int:
    """How often the plan for a budget has more overhead than that for the next smaller one."""
    overheads = [float(row["note"].rpartition("overhead ")[2]) for row in rows]
    return sum(more > less for less, more in pairwise(overheads))


def picture(told: dict[str, Any], into: Path) -> None:
    """Left: the real peak by what was asked for. Right: operations by real peak."""
    from matplotlib import pyplot

    found = next(iter(told.values()))["rows"]
    plain = found[0]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for start, colour, label in (("rt.compile", "C0", "rt.compile"), ("activation", "C1", "activation_memory_budget")):
        some = [row for row in found if row["name"].startswith(start) and not row["failed"]]
        whole = plain["peak"] if start == "rt.compile" else 1
        share = [float(row["name"].partition(", ")[2]) / whole for row in some]
        peaks = [row["peak"] / 1e6 for row in some]
        left.plot(share, peaks, "o-", color=colour, label=label, markersize=3)
        order = sorted(zip(peaks, [row["flops"] / plain["flops"] for row in some], strict=True))
        right.plot(*zip(*order, strict=True), "o-", color=colour, label=label, markersize=3)
    left.plot([0, 1], [0, plain["peak"] / 1e6], ":", color="grey", label="what was asked for")
    blocks = next(row for row in found if row["name"] == BLOCKS)
    right.plot([blocks["peak"] / 1e6], [blocks["flops"] / plain["flops"]], "s", color="C2", label=BLOCKS)
    left.set(xlabel="budget, of the peak without one", ylabel="real peak, MB", ylim=(0, None))
    right.set(xlabel="real peak, MB", ylabel="FLOPs of a step")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(into / "torch-budgets.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = arguments(__doc__, into=None, quick=True)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--compiler", choices=BACKENDS, default="boxed")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--ratios", default=RATIOS, help="of torch; %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = given.into / "torch_budgets.json" if given.into else None
    told: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept is not None and kept.exists() else {}
    if not given.page:
        about, model = MODELS[given.model]
        title = f"{about.format(given.layers)}, dropout {given.dropout:g}"
        title += ", by inductor" * (given.compiler == "inductor")
        case = f"{given.model} {given.dropout:g}{' inductor' * (given.compiler == 'inductor')}"
        say(title)

        def keep(bench: Bench) -> None:
            told[case] = {"title": title, "machine": facts("torch", threads="1"), "rows": rows(bench)}
            write(given.into, "torch_budgets", page_of(told), told)

        def make(run: Run, quick: bool) -> Step:
            return model(run, *((4, 32) if quick else (given.layers, 256)), given.dropout)

        ratios = [float(ratio) for ratio in given.ratios.split(",")]
        bench = measure(make, given.quick, 4 if given.quick else given.budgets, ratios, keep, given.compiler)
        bench.time(given.rounds)
        keep(bench)
    print(page_of(told))
    if given.into is not None:
        write(given.into, "torch_budgets", page_of(told), told)
        pictures = given.into.parent / "pictures"
        pictures.mkdir(exist_ok=True)
        picture(told, pictures)


if __name__ == "__main__":
    main()
