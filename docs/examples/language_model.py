"""A small transformer learns the help texts of Python letter by letter, and its training step keeps to a memory budget.

The model is of equinox, the optimiser of optax; neither knows of the budget, and nothing is marked to be recomputed.
Where there was `jax.jit(step)` there is `recompute_jax.remat(step, budget)`: one line. The script trains both, compares
their losses, and lets the model write. A table (`--table`) has memory, FLOPs and time for several budgets, beside
`jax.checkpoint` around each block under several policies.

    python docs/examples/language_model.py --table --picture language_model.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp

import recompute as rc
import recompute_jax
from _language_network import Training, Transformer, say, windows
from _report import Advance, aligned, into_files, machine, progress, show, write
from recompute.pictures import save

BUDGETS: Final = (1.0, 0.75, 0.5, 0.35, 0.25, 0.2)
POLICIES: Final = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")
TIDY: Final = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}  # `remat` asks for it by itself


# Ways to run it


@dataclass
class Way:
    """One way to compile the step, and what it has learnt with it."""

    name: str
    budget: int | None
    """Bytes of temporaries it was asked to keep to."""
    temporaries: int
    """Bytes that XLA allocates beside arguments and results."""
    flops: float
    """By XLA's count."""
    compiled: Any = field(repr=False)
    learnt: Any = field(repr=False)
    """Weights and state."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of the processors, for each of the first steps."""

    def take(self, read: Any, measured: bool = False) -> None:
        """One step."""
        start = process_time()
        *self.learnt, loss = self.compiled(*self.learnt, read)
        jax.block_until_ready(self.learnt)  # type: ignore[no-untyped-call]  # JAX has no type for it
        if measured:
            self.seconds.append(process_time() - start)
        self.losses.append(float(loss))

    def figures(self) -> dict[str, Any]:
        fields = ("name", "budget", "temporaries", "flops", "losses", "seconds")
        return {name: getattr(self, name) for name in fields}


def compiled(name: str, jitted: Any, training: Training, read: Any, budget: int | None = None) -> Way:
    """`jitted`: what `jax.jit` or `recompute_jax.remat` has made of the step. Raises BudgetError."""
    found = jitted.lower(training.weights, training.state, read).compile()
    memory, flops = found.memory_analysis().temp_size_in_bytes, found.cost_analysis()["flops"]
    return Way(name, budget, memory, flops, found, jax.tree.map(jnp.copy, [training.weights, training.state]))


def checkpoints(training: Training) -> Iterator[tuple[str, Callable[[], Any]]]:
    """`jax.checkpoint` around each block, and names for that."""
    for policy in POLICIES:
        wrap = partial(eqx.filter_checkpoint, policy=getattr(jax.checkpoint_policies, policy))
        for text, options in (("", None), (", memory scheduler", TIDY)):
            step = partial(training.step, wrap=wrap)
            jitted = partial(jax.jit, step, donate_argnums=(0, 1), compiler_options=options)
            yield f"checkpoint, {policy}{text}", jitted


def ways(
    training: Training, read: Any, shares: Sequence[float], others: bool, effort: float, advance: Advance
) -> list[Way]:
    """Plain jit, then `jax.checkpoint` if others are wanted, then within budgets; those that are too small are not."""
    donate = (0, 1)  # the old weights make room for the new ones
    advance(1, "plain jit")
    found = [compiled("plain jit", jax.jit(training.step, donate_argnums=donate), training, read)]
    for name, jitted in checkpoints(training) if others else ():
        advance(1, name)
        found.append(compiled(name, jitted(), training, read))
    for share in shares:
        advance(1, f"budget {share:.0%}")
        budget = int(share * found[0].temporaries)
        planned = recompute_jax.remat(training.step, budget, donate_argnums=donate, effort=effort)  # the line
        try:
            found.append(compiled(f"budget {share:.0%}", planned, training, read, budget))
        except rc.BudgetError as error:
            print(f"budget {share:.0%}: {error}", file=sys.stderr)
    return found


# The script


def draw(trained: Sequence[Way], found: Sequence[Way], path: str | Path) -> Path:
    """The losses of both trainings; memory and time of all ways. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, colour, width in zip(trained, ("#B0B0B0", "#0072B2"), (5, 1), strict=True):
        label = f"{way.name}: {way.temporaries / 1e6:.0f} MB"
        left.plot(way.losses, label=label, color=colour, linewidth=width)
    left.set(xlabel="step", ylabel="loss, nats a letter", title="The same training")
    left.legend(frameon=False)
    looks = {"plain jit": ("#777777", "s"), "checkpoint": ("#D55E00", "^"), "budget": ("#0072B2", "o")}
    for kind, (colour, marker) in looks.items():
        points = [way for way in found if way.name.startswith(kind)]
        sizes, times = [way.temporaries / 1e6 for way in points], [min(way.seconds) for way in points]
        line = "-" if kind == "budget" else ""
        right.plot(sizes, times, color=colour, marker=marker, linestyle=line, label=_LABELS[kind])
    right.set(xlabel="temporaries, MB", ylabel="processor time of a step, s", title="Memory and time")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E4E4E4", linewidth=0.7)
    return save(figure, path)


_LABELS: Final = {"plain jit": "jit", "checkpoint": "jax.checkpoint, each block", "budget": "remat, a budget"}


def _table(found: Sequence[Way]) -> str:
    plain = found[0]
    columns = ["", "budget", "temporaries", "of plain", "GFLOP", "time", "of plain", "loss differs"]
    rows = [
        [
            way.name,
            "" if way.budget is None else f"{way.budget / 1e6:.1f} MB",
            f"{way.temporaries / 1e6:.1f} MB",
            f"{way.temporaries / plain.temporaries:.0%}",
            f"{way.flops / 1e9:.2f}",
            f"{1000 * min(way.seconds):.0f} ms",
            f"{min(way.seconds) / min(plain.seconds):.2f}",
            f"{difference(plain, way):.1e}",
        ]
        for way in found
    ]
    return aligned(columns, rows)


def difference(one: Way, other: Way) -> float:
    """The largest between their losses."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A character-level language model, trained within a memory budget.")
    add = parser.add_argument
    add(
        "--budget",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of plain jit's temporaries; default %(default)s",
    )
    add("--table", action="store_true", help="measure other budgets and jax.checkpoint, too")
    for name, value, text in (
        ("--steps", 600, "of training"),
        ("--depth", 4, "blocks"),
        ("--width", 128, "of the model"),
        ("--heads", 4, "of attention"),
        ("--window", 128, "letters that are read at a time"),
        ("--batch", 16, "windows in a step"),
        ("--repeats", 8, "steps of each way, of which the best time counts"),
        ("--letters", 400, "to be written by the model in the end"),
    ):
        add(name, type=int, default=value, metavar="N", help=text + "; %(default)s")
    add("--rate", type=float, default=4e-3, help="the highest learning rate; %(default)s")
    add("--effort", type=float, default=1.0, metavar="N", help="effort of planning; default %(default)s")
    return into_files(parser, "losses, memory and time")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    sizes = (options.steps, options.depth, options.heads, options.window, options.batch, options.repeats)
    if not 0 < options.budget <= 1:
        parser.error("the budget is a share, more than 0 and at most 1")
    if min(sizes) < 1 or options.width < 1 or options.width % options.heads:
        parser.error("there is at least one of everything, and the width is a multiple of the heads")
    model = Transformer(options.depth, options.width, options.heads, options.window, jax.random.key(0))
    training = Training(model, options.steps, options.rate)
    batches = list(windows(options.steps, options.batch, options.window))
    shares = sorted({options.budget, *(BUDGETS if options.table else ())}, reverse=True)
    first = batches[: options.repeats]
    count = 1 + len(shares) + (2 * len(POLICIES) if options.table else 0)
    with progress(count + len(first) + len(batches)) as advance:
        found = ways(training, batches[0], shares, options.table, options.effort, advance)
        for read in first:
            advance(1, "measuring")
            for way in found:
                way.take(read, measured=True)
        table = _table(found)
        trained = [way for way in found if way.name in ("plain jit", f"budget {options.budget:.0%}")]
        for read in batches[options.repeats :]:
            for way in trained:
                way.take(read)
            advance(1, f"loss {trained[0].losses[-1]:.3f}")

    print(f"{sum(leaf.size for leaf in jax.tree.leaves(training.weights)):,} weights")
    print(table)
    if len(trained) < 2:
        return 1
    plain, within = trained
    apart = difference(plain, within)
    last = [sum(way.losses[-20:]) / len(way.losses[-20:]) for way in trained]
    print(f"loss of {len(plain.losses)} steps: from {plain.losses[0]:.3f} to {last[0]:.3f} (mean of the last 20)")
    print(f"within the budget {last[1]:.3f}; the largest difference of a step {apart:.1e}")
    said = say(eqx.combine(within.learnt[0], training.rest), "the ", options.letters)
    print(said)
    if options.json:
        figures = {"machine": machine("jax", "equinox", "optax"), "ways": [way.figures() for way in found]}
        write({**figures, "options": vars(options), "difference": apart, "said": said}, options.json)
    if options.picture:
        show(lambda: draw(trained, found, options.picture))
    return 0 if apart < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
