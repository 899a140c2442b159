"""Measures `recompute_jax.remat` against plain jit and the best jax.checkpoint, on the same models in one run.

`python benchmarks/jax_remat.py --into docs/results` writes jax.md and jax.json there; `--models mlp,scan` chooses. For
each model the gradient of a loss is compiled plainly (its temporaries are the baseline), within shares of the baseline,
and with jax.checkpoint: whole, per layer and in blocks of k, under every policy, with both schedulers of XLA on CPU.
Memory is `memory_analysis().temp_size_in_bytes`. Configurations are compiled without LLVM's optimizations for their
memory and FLOPs, which these do not change; those that nothing beats in both are compiled fully and timed, in turns
with the others. FLOPs are XLA's own count, but for scans, whose bodies it counts once: there they are counted from the
equations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from math import ceil
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import jax
import numpy as np
from _common import facts, say
from _jax_models import MODELS, Model
from _jax_page import Found, Result, page
from _jax_rivals import MEGA, gflop, rivals, temporaries

import recompute as rc
from recompute import pictures
from recompute_jax import remat
from recompute_jax._program.jaxpr import flatten

ROUNDS: Final = (3, 21)  # at least and at most


def measure(model: Model, seconds: float) -> Result:
    """Everything for one model; about so many seconds of running what was compiled."""
    args = model.params, model.x
    plain = model.function()
    compiled, took = compile_fully(plain, args, {})
    found = Found("plain", temporaries(compiled), gflop(model, plain, compiled, args), took)
    again = Found("plain once more", found.temporaries, found.gflop)
    equations = len(flatten(jax.make_jaxpr(plain)(*args)).equations)
    result = Result(model.name, model.what, equations, found, again)
    expected = jax.tree.leaves(compiled(*args))
    runs: list[tuple[Found, Any]] = [(found, compiled), (again, compile_fully(plain, args, {})[0])]
    say(f"{model.name}: {equations} equations, plain {found.temporaries:.1f} MB, compiled in {took:.1f} s")
    result.checkpoints, known, result.tried = rivals(model, args)
    for checkpoint in result.checkpoints:
        compiled, checkpoint.compile_seconds = compile_fully(known[checkpoint.name][0], args, known[checkpoint.name][1])
        runs.append((checkpoint, compiled))
        say(f"  {checkpoint.name}: {checkpoint.temporaries:.1f} MB, {checkpoint.gflop:.2f} GFLOP")

    asked: list[tuple[str, Any]] = [(f"{share:.0%}", share) for share in model.shares]
    asked += [
        (f"memory of {rival.name}", ceil(rival.temporaries * MEGA))
        for rival in result.checkpoints[: model.rivals]
        if rival.temporaries < 0.99 * found.temporaries
    ]
    for name, budget in asked:
        function = remat(plain, of_peak=budget) if isinstance(budget, float) else remat(plain, budget)
        megabytes = budget * found.temporaries if isinstance(budget, float) else budget / MEGA
        try:
            plan = function.plan(*args)
        except rc.BudgetError as error:
            result.refused.append((megabytes, str(error)))
            say(f"  {name}: {error}")
            continue
        began = perf_counter()
        compiled = function.lower(*args).compile()
        took = perf_counter() - began
        counted = gflop(model, function, compiled, args)
        planned = Found(name, temporaries(compiled), counted, took, plan.seconds, len(plan.trials), budget=megabytes)
        planned.difference = max(map(_difference, expected, jax.tree.leaves(compiled(*args))))
        result.planned.append(planned)
        runs.append((planned, compiled))
        say(
            f"  {name}: {planned.temporaries:.1f} of {megabytes:.1f} MB, {counted:.2f} GFLOP, "
            f"plan in {plan.seconds:.0f} s"
        )
    _time(runs, args, seconds)
    return result


def compile_fully(function: Callable[..., Any], args: Any, options: dict[str, Any]) -> tuple[Any, float]:
    """The compiled function, and the seconds to trace, lower and compile it."""
    jax.clear_caches()
    began = perf_counter()
    compiled = jax.jit(function, compiler_options=options).lower(*args).compile()
    return compiled, perf_counter() - began


def _time(runs: list[tuple[Found, Any]], args: Any, seconds: float) -> None:
    """Rounds in turns, forwards and backwards; the first is to warm up."""
    began = perf_counter()
    for _, run in runs:
        jax.block_until_ready(run(*args))
    least, most = ROUNDS
    for number in range(max(least, min(most, int(seconds / (perf_counter() - began))))):
        for found, run in runs if number % 2 else runs[::-1]:
            start, worked = perf_counter(), process_time()
            jax.block_until_ready(run(*args))
            found.seconds.append(perf_counter() - start)
            found.processor.append(process_time() - worked)


def _difference(expected: Any, made: Any) -> float:
    scale = float(np.abs(np.asarray(expected)).max())
    return float(np.abs(np.asarray(expected) - np.asarray(made)).max()) / scale if scale else 0.0


def draw(file: Path) -> None:
    """The residency chart of a plan: the 6-block transformer in a quarter of its memory."""
    model = MODELS["transformer-6"]()
    plan = remat(model.function(), of_peak=0.25).plan(model.params, model.x)
    figure = pictures.residency(plan.events(), least=0.01, title="6-block transformer", unit="FLOPs and bytes, weighed")
    pictures.save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--into", type=Path, help="a directory for jax.md and jax.json")
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of running what was compiled, for each model")
    parser.add_argument("--picture", type=Path, help="draw the residency chart of a plan into this file, and end")
    options = parser.parse_args()
    if options.picture:
        draw(options.picture)
        return
    about = facts() | {"jax": version("jax"), "jaxlib": version("jaxlib"), "device": str(jax.devices()[0])}
    results: list[Result] = []
    for name in options.models.split(","):
        results.append(measure(MODELS[name](), options.seconds))
        text = page(results, about)
        if options.into:
            options.into.mkdir(parents=True, exist_ok=True)
            (options.into / "jax.md").write_text(text, encoding="utf-8")
            content = {"facts": about, "results": [asdict(result) for result in results]}
            (options.into / "jax.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
