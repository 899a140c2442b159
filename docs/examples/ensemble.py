"""An ensemble answers in any order: its models share a trunk, whose activations are evicted and recomputed.

Several small convolutional networks tell handwritten digits apart. They have their first layers in common (a TreeNet;
Lee and others, 2015), so what the trunk finds in some images serves all of them. Asked for are, for any images and in
any order: what the trunk sees, what one member sees and thinks, what they think together, and where they disagree.
Nothing here says what is to be kept for that. The functions are plain JAX: under `jax.jit` everything stays in memory,
by `recompute_jax.op_by_op` and `recompute_jax.ap` it may go and come back within a budget.

    python docs/examples/ensemble.py --table --picture ensemble.png
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import recompute as rc
from _digits import UNSEEN, load
from _ensemble_network import Outputs, Weights, initial, learn
from _ensemble_outputs import CACHED, PLAIN, Functions, ask, describe, gathered, got, make, members, order
from _report import aligned, machine, progress, show, write
from recompute.events import Event
from recompute.pictures import residency, save

BUDGETS: Final = (0.75, 0.5, 0.35, 0.25, 0.15)
POLICIES: Final = ("needed", "lru")


@dataclass(frozen=True)
class Run:
    """What one way of running it took. Bytes, seconds."""

    name: str
    budget: int | None
    seconds: float
    """Of the processors, to make all and to get all in random order: the best of several runs."""
    live: int
    """The most that JAX's arrays took at once, beyond those that were there before."""
    digests: dict[str, str]
    peak: int = 0
    """The most that the cache counted."""
    overshoot: int = 0
    operations: int = 0
    recomputed: int = 0
    overhead: float = 1.0
    asked: float = 0.0
    """When all was made, on the clock of the events."""


def live() -> int:
    """Bytes of all arrays that JAX has now."""
    gc.collect(0)
    arrays: list[Any] = jax.live_arrays()  # type: ignore[no-untyped-call]  # JAX has no type for it
    return sum({each.unsafe_buffer_pointer(): each.nbytes for each in arrays}.values())


def timed(weights: Weights, images: Any, functions: Functions) -> float:
    start = process_time()
    outputs = make(weights, images, functions)
    for name in order(outputs):
        got(outputs[name]).block_until_ready()
    return process_time() - start


def run_plain(weights: Weights, images: Any, repeats: int) -> Run:
    """Under jit, everything kept."""
    before = live()
    seconds = min(timed(weights, images, PLAIN) for _ in range(1 + repeats))  # the first one compiles
    outputs = make(weights, images, PLAIN)
    return Run("plain jit", None, seconds, live() - before, ask(outputs))


def run(
    weights: Weights, images: Any, budget: int | None = None, policy: str = "needed", *, repeats: int = 1,
    events: list[Event] | None = None,
) -> Run:  # fmt: skip
    """Within a cache: for the time, then once more for the memory, the bits and the events."""
    before = live()
    most = 0
    seconds = []
    for _ in range(1 + repeats):
        with rc.Cache(budget, policy=policy):
            own, seen = rc.wrap((weights, images))
            seconds.append(timed(own, seen, CACHED))

    def look(event: Event) -> None:
        nonlocal most
        most = max(most, live() - before)
        if events is not None:
            events.append(event)

    with rc.Cache(budget, policy=policy) as cache:
        cache.subscribe(look)
        own, seen = rc.wrap((weights, images))
        outputs = make(own, seen, CACHED)
        made = cache.stats()
        digests = ask(outputs)
        stats = cache.stats()
        del outputs
    return Run(
        policy,
        budget,
        min(seconds),
        most,
        digests,
        stats.peak,
        stats.overshoot,
        stats.operations,
        stats.rematerializations,
        stats.overhead,
        made.model_time + made.remat_time,
    )


# The script


def draw(images: Any, digits: Any, outputs: Outputs, chart: Any, path: str | Path) -> Path:
    """The unseen images on which the members disagree most, over the residency chart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    votes = np.stack([gathered(outputs, f"member {number} thinks").argmax(1) for number in range(members(outputs))])
    disagreement = gathered(outputs, "disagreement")
    figure = Figure(figsize=(11, 9.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(2, 7.4))
    above, below = parts
    for axes, at in zip(above.subplots(1, 8), np.argsort(-disagreement[:UNSEEN]), strict=False):
        axes.imshow(-images[at].reshape(8, 8), cmap="gray")
        axes.set_title(f"a {digits[at]}; votes\n" + " ".join(map(str, votes[:, at])), fontsize="medium")
        axes.axis("off")
    chart.set_dpi(160)
    canvas: Any = FigureCanvasAgg(chart)
    canvas.draw()
    axes = below.subplots()
    axes.imshow(np.asarray(canvas.buffer_rgba()))
    axes.axis("off")
    return save(figure, path)


def _table(runs: Sequence[Run], free: Run) -> str:
    columns = ["", "budget", "counted", "live", "time", "recomputed", "compute", "bits"]
    rows = [
        [
            each.name,
            "none" if each.budget is None else f"{each.budget / free.peak:.0%}",
            f"{each.peak / 1e6:.1f} MB" if each.peak else "",
            f"{each.live / 1e6:.1f} MB",
            f"{each.seconds:.2f} s, x {each.seconds / free.seconds:.2f}",
            f"{each.recomputed:,}" if each.operations else "",
            f"{each.overhead:.2f}" if each.operations else "",
            ("the same" if each.digests == free.digests else "WRONG") if each.operations else "",
        ]
        for each in runs
    ]
    return aligned(columns, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="An ensemble with a common trunk, asked within a memory budget.")
    add = parser.add_argument
    add("--budget", type=float, default=0.15, metavar="SHARE", help="of the peak without a budget; %(default)s")
    add("--table", action="store_true", help="other budgets, and another policy, too")
    add("--members", type=int, default=6, metavar="N", help="of the ensemble; %(default)s")
    add("--channels", type=int, default=16, metavar="N", help="of each layer; %(default)s")
    add("--images", type=int, default=1797, metavar="N", help="to be asked about; all, which are %(default)s")
    add("--steps", type=int, default=150, metavar="N", help="of learning; %(default)s")
    add("--repeats", type=int, default=3, metavar="N", help="runs, of which the best time counts; %(default)s")
    add("--json", metavar="PATH", help="write the figures")
    add("--picture", metavar="PATH", help="draw what was in memory when: .png, .svg or .pdf")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 < options.budget <= 1:
        parser.error("the budget is a share, more than 0 and at most 1")
    if min(options.members, options.channels, options.repeats) < 1 or options.images < UNSEEN:
        parser.error(f"there is at least one of everything, and {UNSEEN} images")
    images, digits = (each[: options.images] for each in load())
    first = (POLICIES[0], options.budget)
    jobs = {first, *((policy, share) for policy in POLICIES for share in BUDGETS if options.table)}
    events: list[Event] = []
    with progress(options.steps + 2 + len(jobs)) as advance:
        weights = learn(initial(options.members, options.channels), options.steps, advance)
        given = weights, jnp.asarray(images)
        advance(1, "plain jit")
        runs = [run_plain(*given, options.repeats)]
        advance(1, "no budget")
        runs.append(free := run(*given, repeats=options.repeats))
        for policy, share in sorted(jobs, key=lambda job: (POLICIES.index(job[0]), -job[1])):
            advance(1, f"{policy}, {share:.0%}")
            heard = events if (policy, share) == first else None
            try:
                runs.append(run(*given, int(share * free.peak), policy, repeats=options.repeats, events=heard))
            except rc.BudgetError as error:
                print(f"{policy}, {share:.0%}: {error}", file=sys.stderr)
                continue
            if heard:
                asked = runs[-1].asked
    plain = make(*given, PLAIN)
    print(describe(digits, plain))
    print(f"{len(free.digests)} outputs, made by {free.operations:,} operations, asked for in random order")
    print(_table(runs, free))
    if options.json:
        write(
            {"machine": machine("jax"), "options": vars(options), "runs": [asdict(each) for each in runs]}, options.json
        )
    if options.picture and events:
        title = f"Activations in {options.budget:.0%} of the memory"
        budget = int(options.budget * free.peak)
        marks = [(asked, "all is asked for")]

        def picture() -> Path:
            chart = residency(events, title=title, budget=budget, least=0.005, marks=marks)
            return draw(images, digits, plain, chart, options.picture)

        show(picture)
    return 0 if len(runs) > 2 and all(each.digests == free.digests for each in runs[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
