"""The ways to use jax.checkpoint on a model, and those that nothing beats in memory and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
from _jax_models import Model
from _jax_page import Found

from recompute_jax._program.costs import flops as flops_of
from recompute_jax._program.jaxpr import flatten

MEGA: Final = 1e6
MEMORY: Final = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
LOOKING: Final = {"xla_backend_optimization_level": 0}
HOPELESS: Final = 1.25  # times the memory of what has no more FLOPs

Configuration = tuple[Callable[..., Any], dict[str, Any]]


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
