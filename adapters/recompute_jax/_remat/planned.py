"""`planned`: a function under jit within a budget for its temporaries; called, traced and lowered as jitted ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from jax import tree_util

from recompute.planners import Plan
from recompute.text import bytes_or_peak
from recompute_jax._program.calls import (
    Chosen,
    Shardings,
    held,
    is_function,
    is_inside,
    looks_for_nans,
    shardings_of,
)
from recompute_jax._program.emit import Gate
from recompute_jax._remat.differentiated import is_check
from recompute_jax._remat.options import Costs, Options
from recompute_jax._remat.report import RematPlan, SavedPlan
from recompute_jax._remat.traced import Traces, name_of

P = ParamSpec("P")
R = TypeVar("R")


class _More(TypedDict, total=False):
    """What `planned` takes by name that few need: of the search, and of `jax.jit`."""

    gate: Gate | None
    compilations: int
    seed: int
    compiler_options: Mapping[str, Any] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None


_JIT: Final = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


class _Options(_More, total=False):
    """What `planned` takes by name."""

    of_peak: float | str | None
    plan: str | os.PathLike[str] | RematPlan | Plans[Any] | None
    tiers: Literal["host"] | None
    costs: Costs
    effort: float


@overload
def planned(
    fn: Callable[P, R], budget: int | str | None = None, **options: Unpack[_Options]
) -> PlannedFunction[P, R]: ...


@overload
def planned(
    fn: None = None, budget: int | str | None = None, **options: Unpack[_Options]
) -> Callable[[Callable[P, R]], PlannedFunction[P, R]]: ...


def planned(
    fn: Callable[..., Any] | None = None,
    budget: int | str | None = None,
    *,
    of_peak: float | str | None = None,
    plan: str | os.PathLike[str] | RematPlan | Plans[Any] | None = None,
    tiers: Literal["host"] | None = None,
    costs: Costs = "estimated",
    effort: float = 1.0,
    **more: Unpack[_More],
) -> Any:
    """`jax.jit(fn)` that recomputes what it must to run within `budget` bytes of temporaries. `remat` is another name.

    At the first call with arguments of some shapes and types the function is traced, planned with the library's own
    planner, and compiled. `fn` may be anything that JAX can trace: a loss, its gradient, a whole training step; it may
    use `grad`, `scan`, `jax.checkpoint` and `jit` inside. Outside, `jit`, `vmap` and `grad` may be: under `vmap` the
    budget is for one example, under `grad` it is that of the gradient. Over several devices it is that of each of them.
    `@planned(budget="2GB")` is a decorator.

    Parameters
    ----------
    budget
        Bytes ("2GB", 2_000_000_000) of temporaries, which is what XLA allocates beside arguments and results
        (`memory_analysis().temp_size_in_bytes`).
    of_peak
        Instead of bytes: a share (0.4, "40%") of the temporaries of `jax.jit(fn)`.
    plan
        Instead of a budget: a plan of this function, from `.plan(...)` (or `.plan`, for the latest) or the file that it
        was saved to. Nothing is searched for; the call raises `recompute.planners.PlanError` if the program is another.
    tiers
        "host": values may also move to the memory of the host (`pinned_host`) and come back, where that costs less than
        to repeat them. ValueError at the first call if the backend has none; on CPU, where it is the same memory, a
        warning, and nothing moves.
    costs
        "estimated" from shapes (FLOPs and bytes), or "measured": each kind of segment is compiled and timed, once.
    effort
        How long to plan, in steps, not in seconds, so that a plan is the same on every machine: 1 takes about as long
        as XLA compiles a small function, and less than that for a large one.
    gate
        What keeps XLA from merging a recomputation with the first run: "branch", "select" or "barrier". By default
        "branch" on CPU, where XLA removes barriers, or "select" if that needs fewer FLOPs, and "barrier" elsewhere.
    compilations
        How many schedules are compiled, at most (8), to see what memory XLA needs for them.
    seed
        Of the planner's search (0).
    static_argnums, static_argnames, donate_argnums, donate_argnames, compiler_options
        As of `jax.jit`. By default the scheduler of XLA on CPU is the one for memory, unless `of_peak` is 1.

    The `plan` of what is returned follows `recompute.planners.Plan`. Calls raise `recompute.BudgetError`, which says
    what the least is, if no schedule fits. A wrong argument is a ValueError or TypeError here.
    """
    if (budget is None and of_peak is None) == (plan is None):
        both = "" if plan is None else ", not both"
        raise TypeError(f'planned takes a budget, as planned(fn, "2GB") or planned(fn, of_peak=0.4), or a plan={both}')
    if not (fn is None or callable(fn)):
        raise TypeError(f"planned takes a callable first, not {fn!r}; as a decorator: @planned(budget={fn!r})")
    given: dict[str, Any] = dict(more)
    jit = {name: given.pop(name, None) for name in _JIT}
    unknown = given.keys() - _More.__annotations__.keys()
    if unknown:
        raise TypeError(f"planned takes no {', '.join(sorted(unknown))}")
    if plan is None:
        number, saved = bytes_or_peak(budget, of_peak), None
        size, share = (None, number) if isinstance(number, float) else (number, None)
    else:
        made = plan.latest if isinstance(plan, Plans) else plan
        saved = made.saved if isinstance(made, RematPlan) else SavedPlan.load(made)
        size, share = saved.budget, saved.of_peak
    options = Options(budget=size, of_peak=share, saved=saved, tiers=tiers, costs=costs, effort=effort, **given)

    def wrapped(fn: Callable[..., Any]) -> PlannedFunction[..., Any]:
        jax.jit(fn, **jit)  # raises now what it would raise at the first call
        return PlannedFunction(fn, options, jit)

    return wrapped if fn is None else wrapped(fn)


remat = planned


class Plans(Plan, Generic[P]):
    """The plans of a function: called with arguments it gives the plan for these; its figures are those of the latest.

    Before anything is planned they are AttributeErrors that say so.
    """

    def __init__(self, make: Callable[P, RematPlan], latest: list[RematPlan]) -> None:
        self._make = make
        self._latest = latest

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> RematPlan:
        """What is planned for such arguments (arrays, or `jax.ShapeDtypeStruct`); it prints as a report."""
        return self._make(*args, **kwargs)

    @property
    def latest(self) -> RematPlan:
        """The plan that was made, or asked for, last."""
        if not self._latest:
            raise AttributeError("nothing is planned yet: call the function, or .plan with its arguments")
        return self._latest[0]

    @property
    def budget(self) -> int:
        """Bytes of compiled temporaries that are allowed."""
        return self.latest.budget

    @property
    def peak(self) -> int:
        """Bytes of compiled temporaries."""
        return self.latest.peak

    @property
    def overhead(self) -> float:
        """The cost of all runs divided by that of the function as it is."""
        return self.latest.overhead

    def to_json(self) -> str:
        """The figures of the latest plan as a JSON object."""
        return self.latest.to_json()

    def __str__(self) -> str:
        return str(self.latest) if self._latest else "nothing is planned yet"

    def __repr__(self) -> str:
        return f"<plans, the latest {self._latest}>"


class PlannedFunction(Generic[P, R]):
    """What `planned` returns: call it like the function."""

    def __init__(self, fn: Callable[P, R], options: Options, jit_options: dict[str, Any]) -> None:
        update_wrapper(self, fn, updated=())
        self._fn = fn
        self._static = Chosen(fn, jit_options["static_argnums"], jit_options["static_argnames"])
        self._static_options = {name: value for name, value in jit_options.items() if name.startswith("static")}
        self._options = options
        self._jit_options = jit_options
        self._traces = Traces(fn, options, jit_options)
        self._jits: dict[tuple[bool, Shardings], Any] = {}
        """Part of something that JAX transforms or compiles, or compiled here, for arguments on these devices."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs, leaves = self._hold(args, kwargs)
        return self._jitted(leaves, inside=is_inside(leaves))(*args, **kwargs)  # type: ignore[no-any-return]  # of `jax.jit`, which forgets it

    @property
    def plan(self) -> Plans[P]:
        """`plan(*args)` is the plan for such arguments; `plan.peak` and the like are of the latest one."""
        return Plans(self._plan, self._traces.latest)

    def _plan(self, *args: Any, **kwargs: Any) -> RematPlan:
        args, kwargs, leaves = self._hold(args, kwargs)
        inside, shardings = is_inside(leaves), shardings_of(leaves)
        made: list[RematPlan] = []

        def look(*args: Any, **kwargs: Any) -> int:
            made.append(self._traces.plan(self._traces(args, kwargs, inside, shardings)).report)
            return 0

        update_wrapper(look, self._fn, updated=())
        jax.jit(look, **self._static_options).trace(*args, **kwargs)
        return made[0]

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and trace, as `jax.jit(fn).trace` does."""
        args, kwargs, leaves = self._hold(args, kwargs)
        return self._jitted(leaves, inside=False).trace(*args, **kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The types of the results, as `jax.jit(fn).eval_shape` gives them; nothing is planned."""
        args, kwargs, _ = self._hold(args, kwargs)
        plain: Any = jax.jit(self._traces.run, **self._static_options)
        return plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and what was compiled, as `jax.jit(fn).clear_cache` does."""
        self._traces.clear()
        self._jits.clear()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and lower, as `jax.jit(fn).lower` does."""
        args, kwargs, leaves = self._hold(args, kwargs)
        return self._jitted(leaves, inside=False).lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, if it is an attribute of an instance: as functions are."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        size, share = self._options.budget, self._options.of_peak
        budget = f"{size:,} bytes" if share is None else f"{share:g} of the peak"
        return f"<{name_of(self._fn)} planned within {budget}>"

    def _hold(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[Any]]:
        """The arguments, and their leaves. Functions, as modules of equinox have, become part of the structure."""
        leaves = tree_util.tree_leaves((args, kwargs))
        if any(map(is_function, leaves)):
            dynamic = self._static.without(args, kwargs)
            args, kwargs = self._static.filled(args, kwargs, tree_util.tree_map(held, dynamic))
            leaves = tree_util.tree_leaves((args, kwargs))
        return args, kwargs, leaves

    def _jitted(self, leaves: Sequence[Any], *, inside: bool) -> Any:
        shardings = shardings_of(leaves)
        if (inside, shardings) in self._jits:
            return self._jits[inside, shardings]

        def follow(*args: Any, **kwargs: Any) -> Any:
            if jax.config.values["jax_disable_jit"] or looks_for_nans(args, kwargs):
                return self._traces.run(*args, **kwargs)
            traced = self._traces(args, kwargs, inside, shardings)
            closed = traced.asked.closed
            if inside and (not closed.effects or any(map(is_check, closed.effects))):
                return tree_util.tree_unflatten(traced.tree, traced.call(*closed.consts, *traced.leaves))
            program = self._traces.plan(traced)
            if program.emitted is None:
                return self._traces.run(*args, **kwargs)
            return tree_util.tree_unflatten(traced.tree, program(traced.leaves))

        update_wrapper(follow, self._fn, updated=())
        options = None if inside else self._options.flags or None
        jitted = self._jits[inside, shardings] = jax.jit(follow, compiler_options=options, **self._jit_options)
        return jitted
