"""The page of the benchmark of PyTorch: tables of what was measured."""

from __future__ import annotations

from typing import Any, Final

from _common import markdown

MEGA: Final = 1e6
SHARES: Final = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
MOST: Final = 3.0  # times the compute without eviction: with more, a batch or a depth does not count as fitting

HEAD: Final = """# PyTorch: training in a memory budget

`rt.budget` around training steps of the models in the DTR paper, at sizes that suit a CPU, measured by `python
benchmarks/torch_training.py --into docs/results` in one run on one thread. Blocks are on the native path. Nothing here
was measured on a GPU.

*Peak* is the most that torch's allocator had given out: parameters, gradients, the optimizer's state, inputs,
activations, and what kernels need while they run, such as a convolution's scratch memory. Blocks count it themselves;
for all else torch's own profiler says it. The budget limits it. *Recomputed* is the number of repeated operator calls
in all steps of the run. *Time* is CPU time for one step, the least of four, as a ratio to plain torch. *Bits* says
whether losses, parameters and buffers equal those of plain torch.
"""


def page(found: dict[str, Any]) -> str:
    """All of it."""
    tables = [budget_table(model) for model in found["models"].values()]
    return "\n\n".join([HEAD.strip(), goals(found), *tables, *others(found), ending(found["machine"])]) + "\n"


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
    return f"## {model['what']}\n\n{markdown(header, lines)}"


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
        header = ("model", "other way", "peak MB", "time", "`rt.budget`: time", "recomputed")
        parts.append(
            "## Compared with other ways to save memory\n\nThe budget of `rt.budget` is the peak of the other way.\n\n"
            + markdown(header, lines)
        )
    if found["growing"]:
        lines = []
        for row in found["growing"]:
            last = row["runs"][-1] if row["runs"] else {"needs": row["budget"], "overhead": 1.0, "ratio": 1.0}
            lines.append((
                row["name"], mega(row["budget"]), f"{row['plain']} {row['unit']}", f"{row['ours']} {row['unit']}",
                f"{row['ours'] / row['plain']:.1f}", mega(last["needs"]), f"{last['overhead']:.2f}",
                f"{last['ratio']:.2f}",
            ))  # fmt: skip
        header = (
            "",
            "budget MB",
            "plain torch",
            "in the block",
            "ratio",
            "plain torch would need MB",
            "compute",
            "time",
        )
        parts.append(
            "## The largest size that fits\n\n"
            "The budget is what plain torch needs for the size in the third column. Larger sizes, 1.5 to 8 times that, "
            f"were tried until one did not fit or took more than {MOST:.0f} times the compute without eviction. "
            '"Compute" is the overhead of the largest size that fits. '
            '"Time" is that of a step, divided by the time of plain torch with unlimited '
            "memory.\n\n" + markdown(header, lines)
        )
    if found.get("recorded"):
        step = found["recorded"]
        lines = [
            (
                f"{run['share']:.0%}",
                run["status"],
                f"{run['again']:,}",
                f"{run['overhead'] or 0:.2f}" if run["overhead"] else "",
            )
            for run in step["runs"]
        ]
        parts.append(
            f"## A recorded step\n\nOne step of a ResNet ({step['operations']} operators) was recorded with `trace=`; "
            f"the trace takes {step['bytes'] / 1000:.0f} kB. The peak of the step is {mega(step['peak'])} MB, that of "
            f"its replay {mega(sum(step['baseline'].values()))} MB. The simulator's results for smaller budgets:\n\n"
            + markdown(("budget", "status", "recomputed", "overhead"), lines)
        )
    return parts


def ending(machine: dict[str, str]) -> str:
    return "## Machine\n\n" + markdown(("", "", ""), [(name, value, "") for name, value in machine.items()])
