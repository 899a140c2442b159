"""`remat`: a function under jit within a budget for its temporaries, whatever it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from recompute_jax._emit.gates import Gate
from recompute_jax._remat.jitted import Remat
from recompute_jax._remat.options import Requested, checked, parsed
from recompute_jax._remat.report import RematPlan
from recompute_jax._remat.saved import SavedPlan

P = ParamSpec("P")
R = TypeVar("R")


class _Options(TypedDict, total=False):
    """What `remat` takes by name."""

    plan: str | os.PathLike[str] | RematPlan | None
    gate: Gate | None
    costs: Literal["estimated", "measured"]
    effort: float
    compilations: int
    seed: int
    offload: bool
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    compiler_options: Mapping[str, Any] | None


@overload
def remat(fn: Callable[P, R], budget: float | int | str | None = None, **options: Unpack[_Options]) -> Remat[P, R]: ...


@overload
def remat(
    fn: None = None, budget: float | int | str | None = None, **options: Unpack[_Options]
) -> Callable[[Callable[P, R]], Remat[P, R]]: ...


def remat(
    fn: Callable[..., Any] | None = None,
    budget: float | int | str | None = None,
    *,
    plan: str | os.PathLike[str] | RematPlan | None = None,
    gate: Gate | None = None,
    costs: Literal["estimated", "measured"] = "estimated",
    effort: float = 1.0,
    compilations: int = 8,
    seed: int = 0,
    offload: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """`jax.jit(fn)` that recomputes what it must to run within `budget` bytes of temporaries.

    At the first call with arguments of some shapes and types the function is traced, planned with the library's own
    planner, and compiled. `fn` may be anything that JAX can trace: a loss, its gradient, a whole training step; it may
    use `grad`, `scan`, `jax.checkpoint` and `jit` inside. Outside, `jit`, `vmap` and `grad` may be: under `vmap` the
    budget is for one example, under `grad` it is that of the gradient. Over several devices it is that of each of them.
    `@remat(budget="2GB")` is a decorator.

    Parameters
    ----------
    budget
        Bytes ("2GB", 2_000_000_000) of temporaries, which is what XLA allocates beside arguments and results
        (`memory_analysis().temp_size_in_bytes`), or a share (0.4, "40%") of those of `jax.jit(fn)`.
    plan
        Instead of a budget: a plan of this function, from `.plan(...)` or the file that it was saved to. Nothing
        is searched for; the call raises `recompute.planners.PlanError` if the program is another one.
    gate
        What keeps XLA from merging a recomputation with the first run: "branch", "select" or "barrier". By default
        "branch" on CPU, where XLA removes barriers, or "select" if that needs fewer FLOPs, and "barrier" elsewhere.
    costs
        "estimated" from shapes (FLOPs and bytes), or "measured": each kind of segment is compiled and timed, once.
    effort
        How long to plan, in steps, not in seconds, so that a plan is the same on every machine: 1 takes about as long
        as XLA compiles a small function, and less than that for a large one.
    compilations
        How many schedules are compiled, at most, to see what memory XLA needs for them.
    offload
        Values may also move to the memory of the host (`pinned_host`) and come back, where that costs less than to
        repeat them. ValueError at the first call if the backend has none; on CPU, where it is the same memory, a
        warning, and nothing moves.
    static_argnums, static_argnames, donate_argnums, donate_argnames, compiler_options
        As of `jax.jit`. By default the scheduler of XLA on CPU is the one for memory, unless the budget is 100 %.

    Calls raise `recompute.BudgetError`, which says what the least is, if no schedule fits; ValueError or TypeError for
    a wrong argument, at once.
    """
    if (budget is None) == (plan is None):
        raise TypeError("remat takes a budget, as in remat(fn, 0.4) or @remat(budget=0.4), or a plan=, and not both")
    if not (fn is None or callable(fn)):
        raise TypeError(f"remat takes a callable first, not {fn!r}; as a decorator: @remat(budget={fn!r})")
    share, size = (None, None) if budget is None else parsed(budget)
    checked(gate, costs, effort, compilations, seed)
    saved = None if plan is None else plan.saved if isinstance(plan, RematPlan) else SavedPlan.load(plan)
    requested = Requested(share, size, gate, costs, effort, compilations, seed, compiler_options, saved, offload)
    options: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }

    def wrapped(fn: Callable[..., Any]) -> Remat[..., Any]:
        jax.jit(fn, **options)  # raises now what it would raise at the first call
        return Remat(fn, requested, options)

    return wrapped if fn is None else wrapped(fn)
