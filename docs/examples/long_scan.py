"""The gradient of a neural ODE through ever longer scans, in memory that grows with the logarithm of their length.

A neural ODE (Chen and others, 2018) is a network of one layer applied n times in small steps. Its gradient reads the
steps backwards, so plain JAX keeps something of each: memory in proportion to n. With checkpoints every sqrt(n) steps,
placed by hand, it is in proportion to sqrt(n). Here a budget of some log2(n) states is all that is said: under jit
(`recompute_jax.remat`), and for shorter scans step by step through the cache (`recompute_jax.op_by_op`).

    python docs/examples/long_scan.py --picture long_scan.png
"""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isqrt, log2
from pathlib import Path
from time import process_time
from typing import Any, Final

import jax
import jax.numpy as jnp

import recompute as rc
import recompute_jax
from _digits import load
from _neural_ode import BATCH, STATE, Weights, gradient, initial, train
from _report import Advance, aligned, into_files, machine, progress, show, write
from recompute.pictures import save

LOOKS: Final = {
    "plain": ("#777777", "s", "plain jit"),
    "blocks": ("#D55E00", "^", "jax.checkpoint, blocks of √n"),
    "budget": ("#0072B2", "o", "remat, a budget"),
    "op by op": ("#009E73", "D", "op by op, a budget"),
}


# Measuring


@dataclass
class Run:
    """The gradient for one n, in one way. Bytes, seconds."""

    n: int
    way: str
    memory: int
    """Temporaries that XLA allocates; op by op: what the cache counts beside weights and images, at most."""
    seconds: float
    """Of the processors: the best of several runs."""
    apart: float
    """The largest difference from plain jit, of the largest element."""
    budget: int | None = None
    compute: float = 1.0
    """Computed, recomputation included, divided by what is needed once; checkpoints compute each step twice at most."""
    recipes: int | None = None
    """Op by op: the most that Python's own objects took."""


def budget_for(n: int, factor: float) -> int:
    """Bytes: so many times log2(n) states."""
    return int(factor * log2(n) * STATE)


def measure(n: int, factor: float, eager: bool, repeats: int, effort: float, advance: Advance) -> list[Run]:
    """All ways for one n; `eager`: also op by op. What does not fit into its budget is left out, and said."""
    images, digits = load()
    given = initial(), images[:BATCH], digits[:BATCH]
    budget = budget_for(n, factor)
    found: list[Run] = []
    functions: list[Any] = []

    def add(way: str, jitted: Any, **more: Any) -> None:
        compiled = jitted.lower(*given).compile()
        made = compiled(*given)
        apart = difference(functions[0](*given), made) if functions else 0.0
        functions.append(compiled)
        found.append(Run(n, way, compiled.memory_analysis().temp_size_in_bytes, float("inf"), apart, **more))

    advance(1, f"{n} steps, plain")
    add("plain", jax.jit(gradient(n)))
    advance(1, f"{n} steps, blocks")
    add("blocks", jax.jit(gradient(n, 2 ** (isqrt(n).bit_length() - 1))))
    advance(1, f"{n} steps, a budget")
    try:
        planned = recompute_jax.remat(gradient(n), budget, effort=effort)
        plan = planned.plan(*given)
        add("budget", planned, budget=budget, compute=1 + plan.extra_flops / plan.flops)
    except rc.BudgetError as error:
        print(f"{n} steps: {error}", file=sys.stderr)
    for _ in range(repeats):
        for run, function in zip(found, functions, strict=True):
            start = process_time()
            jax.block_until_ready(function(*given))  # type: ignore[no-untyped-call]  # JAX has no type for it
            run.seconds = min(run.seconds, process_time() - start)
    if eager:
        advance(1, f"{n} steps, op by op")
        try:
            found.append(op_by_op(n, budget, given, functions[0](*given)))
        except rc.BudgetError as error:
            print(f"{n} steps, op by op: {error}", file=sys.stderr)
    return found


def op_by_op(n: int, budget: int, given: Any, expected: Weights) -> Run:
    """Each equation of each step is an operation of the cache; weights and images come on top of the budget."""
    always = sum(jnp.asarray(leaf).nbytes for leaf in jax.tree.leaves(given))
    function = recompute_jax.op_by_op(gradient(n), unroll_scans=True)
    with rc.Cache(always + budget) as cache:
        function(*given)  # compiles each kind of equation
    tracemalloc.start()
    with rc.Cache(always + budget):
        function(*given)
    recipes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with rc.Cache(always + budget) as cache:
        start = process_time()
        made = function(*given)
        seconds = process_time() - start
    stats = cache.stats()
    compute = 1 + stats.rematerializations / stats.operations
    return Run(n, "op by op", stats.peak - always, seconds, difference(expected, made), budget, compute, recipes)


def difference(expected: Weights, made: Weights) -> float:
    """The largest, of the largest element of each array."""
    return max(float(jnp.abs(made[name] - array).max() / jnp.abs(array).max()) for name, array in expected.items())


# The script


def draw(runs: Sequence[Run], factor: float, path: str | Path) -> Path:
    """Memory, and time by that of plain jit, over n. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = {run.n: run.seconds for run in runs if run.way == "plain"}
    for way, (colour, marker, label) in LOOKS.items():
        points = [run for run in runs if run.way == way]
        sizes = [run.n for run in points]
        left.plot(sizes, [run.memory / 1e6 for run in points], color=colour, marker=marker, label=label)
        right.plot(sizes, [run.seconds / plain[run.n] for run in points], color=colour, marker=marker)
    sizes = [*plain]
    budgets = [budget_for(n, factor) / 1e6 for n in sizes]
    left.plot(sizes, budgets, color="#333333", linestyle=":", label=f"the budget, {factor:g} log₂ n states")
    left.set(ylabel="memory, MB", title="Memory of the gradient")
    right.set(ylabel="times plain jit", title="Processor time")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("n, steps of the scan")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E4E4E4", linewidth=0.7)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return save(figure, path)


def _table(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        budget = "" if run.budget is None else f"{run.budget / 1e6:.2f} MB"
        recipes = "" if run.recipes is None else f"{run.recipes / 1e6:.1f} MB"
        compute = "" if run.way in ("plain", "blocks") else f"{run.compute:.2f}"
        time = f"{1000 * run.seconds:,.0f} ms"
        memory = f"{run.memory / 1e6:,.2f} MB"
        rows.append([f"{run.n:,}", run.way, budget, memory, time, compute, f"{run.apart:.0e}", recipes])
    return aligned(["n", "", "budget", "memory", "time", "compute", "differs", "recipes"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The gradient of a long scan in O(log n) memory.")
    add = parser.add_argument
    add("--smallest", type=int, default=8, metavar="K", help="from 2^K steps; default %(default)s")
    add("--largest", type=int, default=16, metavar="K", help="to 2^K steps; default %(default)s")
    add("--op-by-op", type=int, default=11, metavar="K", help="op by op to 2^K steps; default %(default)s")
    add("--factor", type=float, default=4.0, metavar="C", help="the budget is C log2(n) states; default %(default)s")
    add("--train", type=int, default=300, metavar="N", help="steps of training at 2^SMALLEST; default %(default)s")
    add("--repeats", type=int, default=3, metavar="N", help="how many runs; the best time counts; default %(default)s")
    add("--effort", type=float, default=1.0, metavar="N", help="effort of planning; default %(default)s")
    return into_files(parser, "memory and time")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 2 <= options.smallest <= options.largest or options.factor <= 0 or options.repeats < 1:
        parser.error("there are at least 2^2 steps, the largest is not below the smallest, and the rest is above 0")
    sizes = range(options.smallest, options.largest + 1)
    runs: list[Run] = []
    with progress(options.train + sum(3 + (k <= options.op_by_op) for k in sizes)) as advance:
        n = 2**options.smallest
        slopes = recompute_jax.remat(gradient(n), budget_for(n, options.factor), effort=options.effort)
        before, after = train(n, slopes, options.train, advance)
        for k in sizes:
            eager = k <= options.op_by_op
            runs += measure(2**k, options.factor, eager, options.repeats, options.effort, advance)
    print(f"{options.train} steps within the budget: from {before:.1%} to {after:.1%} of unseen digits")
    print(f"a state takes {STATE:,} bytes, the budget is {options.factor:g} log2(n) of them")
    print(_table(runs))
    if options.json:
        figures = {"machine": machine("jax", "optax"), "state": STATE, "runs": [asdict(run) for run in runs]}
        write({**figures, "before": before, "after": after}, options.json)
    if options.picture:
        show(lambda: draw(runs, options.factor, options.picture))
    return 0 if all(run.apart < 2e-6 for run in runs if run.budget is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
