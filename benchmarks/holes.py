"""Whether more memory can hurt: recorded training iterations, replayed at a fine grid of budgets.

A budget works if the run finishes with an overhead of at most 2. A *hole* is a budget that fails although a smaller one
works. A budget is *worse* if its overhead is over 3 % higher than that of a smaller one. Overheads come from replays
with a virtual clock, so they are the same on every machine. The default policy runs as in the library, a published one
as in its authors' simulator. With the compiled form the grid takes some ten minutes.

    python benchmarks/holes.py TRACES_FOLDER [--step 0.004] [--noise 4] [--into docs/results]
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Final

from _common import ROOT, arguments, markdown, page, publish, say

sys.path.insert(0, str(ROOT / "tests" / "simulator"))
from grids import Grid, grid, measure, noisy  # where the tests that use them are, too

from recompute.traces import read

TRACES: Final = ("unet", "resnet32", "transformer", "treelstm", "unroll_gan")
NOISY: Final = ("unet", "resnet32")
DRAWN: Final = 0.31
"""The largest budget that is drawn: above it all work."""


def main() -> None:
    parser = arguments(__doc__, traces=True)
    parser.add_argument("--step", type=float, default=0.004, help="between budgets, as a share of the peak")
    parser.add_argument("--least", type=float, default=0.05, help="the smallest budget")
    parser.add_argument("--noise", type=int, default=4, help="how many seeds for noisy costs")
    parser.add_argument("--policy", default="default", help="policies, separated by commas")
    options = parser.parse_args()
    budgets = grid(options.least, 0.9, options.step)
    rows: list[tuple[str, ...]] = []
    drawn: list[str] = []
    for name in TRACES:
        program = read(options.traces / f"{name}.jsonl")
        for policy in options.policy.split(","):
            start = perf_counter()
            found = measure(program, budgets, policy)
            rows.append((name, policy, *_row(found)))
            drawn.append(f"{name:<12}{policy:<9}{_strip(found)}")
            say(f"{name}, {policy}: {perf_counter() - start:.0f} s")
    noise: list[tuple[str, ...]] = []
    for name in NOISY:
        program = read(options.traces / f"{name}.jsonl")
        for seed in range(1, options.noise + 1):
            noise.append((name, str(seed), *_row(measure(noisy(program, seed), budgets))))
    names = ("smallest that works", "holes", "worse", "largest ratio to a smaller one")
    text = page(
        "Holes",
        __doc__,
        f"Budgets are from {options.least:g} to 0.9 of the peak, in steps of {options.step:g}.",
        markdown(("trace", "policy", *names), rows),
        f"The same from {options.least:g} to {DRAWN}; above that, all work: "
        "`#` works, `.` fails, `+` works but is worse than a smaller one.",
        "\n".join(["```console", *drawn, "```"]),
        "The default policy, with every cost multiplied by a random number from 0.6 to 1.67:",
        markdown(("trace", "seed", *names), noise),
    )
    publish(options.into, "holes", text)


def _row(found: Grid) -> tuple[str, ...]:
    least = "none" if found.least is None else f"{found.least:g}"
    holes = ", ".join(f"{budget:g}" for budget in found.holes) or "none"
    dearer = f"{len(found.dearer)}" + (f", {found.dearer[0]:g} to {found.dearer[-1]:g}" if found.dearer else "")
    return least, holes, dearer, f"{found.worst:.3f}"


def _strip(found: Grid) -> str:
    dearer = set(found.dearer)
    drawn = [(at, overhead) for at, overhead in found.overheads.items() if at <= DRAWN]
    return "".join("." if overhead is None else "+" if at in dearer else "#" for at, overhead in drawn)


if __name__ == "__main__":
    main()
