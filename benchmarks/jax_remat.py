"""`recompute_jax.remat` compared with plain jit and with the best jax.checkpoint, on the same models in one run.

`python benchmarks/jax_remat.py --into docs/results` writes jax.md and jax.json there. For each model the gradient of a
loss is compiled plainly (its temporaries are the baseline), within shares of the baseline, and with jax.checkpoint:
whole, per layer and in blocks of k, under every policy, with both schedulers of XLA on CPU. Memory is the size of XLA's
temporaries (`memory_analysis().temp_size_in_bytes`). Configurations are compiled without LLVM's optimizations for their
memory and FLOPs, which these do not change; those that nothing beats in both are compiled fully and timed. FLOPs are
XLA's own count, but for scans, whose bodies it counts once: there they are counted from the equations.

Times: after a warm-up run, all compiled programs of a model run once per round, in order and then in reverse order.
"ms" is a program's median. Two programs are compared by the ratio of their times in the same round (the median over all
rounds), so that other work on the machine affects both alike. Plain jit is compiled and timed twice; how far the ratio
of the two is from 1 is the noise of that model. CPU time is that of all threads of the process; other programs disturb
it less. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import jax
import numpy as np
from _common import arguments, facts, page, say, write
from _jax_models import MODELS, Model
from _jax_page import Found, Result, parts

import recompute as rc
from recompute import pictures
from recompute_jax import remat
from recompute_jax._program.jaxpr import flatten
from recompute_jax._program.segments import flops as flops_of

ROUNDS: Final = (3, 21)  # at least and at most
MEGA: Final = 1e6
MEMORY: Final = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
LOOKING: Final = {"xla_backend_optimization_level": 0}
HOPELESS: Final = 1.25  # times the memory of what has no more FLOPs

Configuration = tuple[Callable[..., Any], dict[str, Any]]


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


# Ways to use jax.checkpoint


def rivals(model: Model, args: Any) -> tuple[list[Found], dict[str, Configuration], int]:
    """Those that nothing beats; how to compile each; how many were compiled.

    All are compiled with the scheduler for memory. With the other one only those that come near: it changes no FLOPs
    and rarely needs less memory.
    """
    tried: list[Found] = []
    known: dict[str, Configuration] = {}
    for name, function in _functions(model):
        full = f"{name}, memory scheduler"
        known[full] = function, MEMORY
        tried.append(_look(full, model, args, *known[full]))
    best = front(tried)
    for found in list(tried):
        if any(_is_hopeless(found, other) for other in best):
            continue
        name = found.name.removesuffix(", memory scheduler")
        known[name] = known[found.name][0], {}
        tried.append(_look(name, model, args, *known[name]))
    return front(tried), known, len(tried)


def front(found: Sequence[Found]) -> list[Found]:
    """Those with fewer FLOPs than all that need no more memory."""
    best: list[Found] = []
    for checkpoint in sorted(found, key=lambda one: (one.temporaries, one.gflop)):
        if not best or checkpoint.gflop < best[-1].gflop * 0.9995:
            best.append(checkpoint)
    return best


def temporaries(compiled: Any) -> float:
    """MB."""
    return float(compiled.memory_analysis().temp_size_in_bytes) / MEGA


def gflop(model: Model, function: Callable[..., Any], compiled: Any, args: Any) -> float:
    """By XLA's count, but for scans, whose bodies it counts once: there by the equations."""
    if model.scanned:
        flat = flatten(jax.make_jaxpr(function)(*args), inline_custom=True)
        return sum(map(flops_of, flat.equations)) / 1e9
    return float(compiled.cost_analysis()["flops"]) / 1e9


def _functions(model: Model) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "plain", model.function()
    for block in (0, *model.blocks):
        name = "whole" if not block else "each layer" if block == 1 else f"blocks of {block}"
        for policy in model.policies:
            save = getattr(jax.checkpoint_policies, policy)
            wrap = lambda f, save=save: jax.checkpoint(f, policy=save)
            yield f"{name}, {policy}", model.function(wrap, block)


def _look(name: str, model: Model, args: Any, function: Callable[..., Any], options: dict[str, Any]) -> Found:
    """Compiled without LLVM's optimizations, which change neither memory nor FLOPs."""
    compiled = jax.jit(function, compiler_options={**options, **LOOKING}).lower(*args).compile()
    return Found(name, temporaries(compiled), gflop(model, function, compiled, args))


def _is_hopeless(one: Found, other: Found) -> bool:
    return one.gflop >= other.gflop and one.temporaries > HOPELESS * other.temporaries


# Times


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
    parser = arguments(__doc__.split("\n", 1)[0], into=None)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of running what was compiled, for each model")
    parser.add_argument("--picture", type=Path, help="draw the residency chart of a plan into this file, and end")
    options = parser.parse_args()
    if options.picture:
        draw(options.picture)
        return
    machine = facts("jax", "jaxlib", device=str(jax.devices()[0]))
    results: list[Result] = []
    for name in options.models.split(","):
        results.append(measure(MODELS[name](), options.seconds))
        text = page("JAX under jit: memory, FLOPs and time", __doc__, *parts(results), machine=machine)
        figures = {"facts": machine, "results": [asdict(result) for result in results]}
        write(options.into, "jax", text, figures)
    print(text)


if __name__ == "__main__":
    main()
