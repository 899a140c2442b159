"""`remat`: a function under jit within a budget for its temporaries, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Generic, Literal, ParamSpec, TypeVar

import jax
from jax import tree_util

from recompute_jax._asked import Asked, checked, parsed
from recompute_jax._gates import Gate
from recompute_jax._jaxpr import struct
from recompute_jax._options import Planned
from recompute_jax._plan import make
from recompute_jax._report import RematPlan

_NOT_TRACEABLE: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

P = ParamSpec("P")
R = TypeVar("R")


def remat(
    fn: Callable[P, R],
    budget: float | int | str,
    *,
    gate: Gate | None = None,
    costs: Literal["estimated", "measured"] = "estimated",
    time_limit: float = 6.0,
    compilations: int = 8,
    seed: int = 0,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Remat[P, R]:
    """`jax.jit(fn)` that recomputes what it must to run within `budget` bytes of temporaries.

    At the first call with arguments of some shapes and types the function is traced, planned with the library's own
    planner, and compiled. `fn` may be anything that JAX can trace: a loss, its gradient, a whole training step; it may
    use `grad`, `scan`, `jax.checkpoint` and `jit` inside. Outside, `jit`, `vmap` and `grad` see the planned equations:
    under `vmap` the budget is for one example, under `grad` the plan is for the forward pass.

    Parameters
    ----------
    budget
        Bytes ("2GB", 2_000_000_000) of temporaries, which is what XLA allocates beside arguments and results
        (`memory_analysis().temp_size_in_bytes`), or a share (0.4, "40%") of those of `jax.jit(fn)`.
    gate
        What keeps XLA from merging a recomputation with the first run: "branch", "select" or "barrier". By default
        "branch" on CPU, where XLA removes barriers, or "select" if that needs fewer FLOPs, and "barrier" elsewhere.
    costs
        "estimated" from shapes (FLOPs and bytes), or "measured": each kind of segment is compiled and timed, once.
    time_limit
        Seconds for planning, without compiling.
    compilations
        How many schedules are compiled, at most, to see what memory XLA needs for them.
    static_argnums, static_argnames, donate_argnums, donate_argnames, compiler_options
        As of `jax.jit`. By default the scheduler of XLA on CPU is the one for memory, unless the budget is 100 %.

    Calls raise `recompute.BudgetError`, which says what the least is, if no schedule fits; ValueError or TypeError for
    a wrong argument, at once.
    """
    share, size = parsed(budget)
    checked(gate, costs, time_limit, compilations, seed)
    asked = Asked(share, size, gate, costs, time_limit, compilations, seed, compiler_options)
    options: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }
    jax.jit(fn, **options)  # raises now what it would raise at the first call
    return Remat(fn, asked, options)


class Remat(Generic[P, R]):
    """What `remat` returns: call it like the function."""

    def __init__(self, fn: Callable[P, R], asked: Asked, jit_options: dict[str, Any]) -> None:
        update_wrapper(self, fn, updated=())
        self._fn = fn
        self._asked = asked
        self._jit_options = jit_options
        self._planned: dict[Any, tuple[Planned, Any]] = {}
        self._outside: Any = None  # compiled here
        self._inside: Any = None  # part of something that JAX transforms or compiles

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._jitted(_is_inside(args, kwargs))(*args, **kwargs)  # type: ignore[no-any-return]  # of `jax.jit`, which forgets it

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> RematPlan:
        """What is planned for such arguments (arrays, or `jax.ShapeDtypeStruct`); it prints as a report."""
        found: list[Planned] = []
        inside = _is_inside(args, kwargs)

        def look(*args: Any, **kwargs: Any) -> int:
            found.append(self._plan_for(args, kwargs, inside)[0])
            return 0

        update_wrapper(look, self._fn, updated=())
        jax.jit(look, **_static(self._jit_options)).trace(*args, **kwargs)
        return found[0].report

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and lower, as `jax.jit(fn).lower` does."""
        return self._jitted(False).lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, if it is found on an instance: as functions are."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        asked = self._asked
        return f"<remat of {_name(self._fn)} within {asked.share if asked.size is None else asked.size}>"

    def _jitted(self, inside: bool) -> Any:
        if inside:
            if self._inside is None:
                self._inside = jax.jit(self._following(True), **self._jit_options)
            return self._inside
        if self._outside is None:
            options = self._asked.compiler_options() or None
            self._outside = jax.jit(self._following(False), compiler_options=options, **self._jit_options)
        return self._outside

    def _following(self, inside: bool) -> Callable[..., Any]:
        def follow(*args: Any, **kwargs: Any) -> Any:
            if jax.config.values["jax_disable_jit"] or _clean():  # JAX looks for the operation that made a NaN
                return self._fn(*args, **kwargs)
            planned, leaves, tree = self._plan_for(args, kwargs, inside)
            if planned.emitted is None:
                return self._fn(*args, **kwargs)
            return tree_util.tree_unflatten(tree, planned(leaves))

        update_wrapper(follow, self._fn, updated=())
        return follow

    def _plan_for(self, args: Any, kwargs: Any, inside: bool) -> tuple[Planned, list[Any], Any]:
        """The plan, the arguments to give it, and the structure of the results. Called while JAX traces."""
        given, structure = tree_util.tree_flatten((args, kwargs))
        dynamic = [isinstance(each, jax.core.Tracer) for each in given]
        leaves = [each for each, traced in zip(given, dynamic, strict=True) if traced]
        fixed = [None if traced else each for each, traced in zip(given, dynamic, strict=True)]

        def run(*values: Any) -> Any:
            fill = iter(values)
            whole = [next(fill) if traced else each for each, traced in zip(fixed, dynamic, strict=True)]
            args, kwargs = tree_util.tree_unflatten(structure, whole)
            return self._fn(*args, **kwargs)

        update_wrapper(run, self._fn, updated=())  # JAX's errors name the function and its line
        avals = [jax.typeof(each) for each in leaves]
        key = inside, *_signature(args, kwargs), tuple(avals), jax.default_backend(), _context()
        known = self._planned.get(key)
        if known is not None:
            return known[0], leaves, known[1]
        try:
            closed, shape = jax.make_jaxpr(run, return_shape=True)(*map(struct, avals))
        except _NOT_TRACEABLE as error:
            error.add_note(
                f"recompute_jax.remat traces {_name(self._fn)} as jax.jit does, without values: use lax.cond or "
                "jnp.where for what depends on them, or static_argnums"
            )
            raise
        tree = tree_util.tree_structure(shape)
        donated = _donated(args, kwargs, self._jit_options)
        flags = [each for each, traced in zip(donated, dynamic, strict=True) if traced]
        planned = make(closed, _name(self._fn), self._asked.options(inside), flags)
        if not any(isinstance(each, jax.core.Tracer) for each in (*closed.consts, *planned.constants)):
            self._planned[key] = planned, tree
        return planned, leaves, tree


def _is_inside(args: Any, kwargs: Any) -> bool:
    """Whether JAX transforms or compiles what calls this."""
    if any(isinstance(each, jax.core.Tracer) for each in tree_util.tree_leaves((args, kwargs))):
        return True
    return not _clean()


def _signature(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The structure of the arguments that are traced, and the others, which jit wants to be hashable as a whole."""
    named = [*enumerate(args), *sorted(kwargs.items())]
    leaves = {name: tree_util.tree_leaves(arg) for name, arg in named}
    static = {
        name for name, found in leaves.items() if found and not any(isinstance(each, jax.core.Tracer) for each in found)
    }
    traced = [(name, None if name in static else arg) for name, arg in named]
    fixed = tuple([(name, type(arg), arg) for name, arg in named if name in static])
    return tree_util.tree_structure(traced), fixed


def _context() -> Any:
    """What jit compiles anew for: precision, kinds of random numbers, x64, meshes and so on."""
    from jax._src.config import trace_context  # there is no public way to ask

    return trace_context()


def _clean() -> bool:
    from jax._src.core import trace_state_clean  # there is no public way to ask

    return bool(trace_state_clean())


def _static(jit_options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in jit_options.items() if name.startswith("static")}


def _donated(args: Any, kwargs: Any, jit_options: dict[str, Any]) -> list[bool]:
    """For each leaf whether it is donated."""
    numbers = jit_options["donate_argnums"]
    names = jit_options["donate_argnames"]
    chosen = {numbers} if isinstance(numbers, int) else set(numbers or ())
    chosen = {each % len(args) for each in chosen if args and -len(args) <= each < len(args)}
    named = {names} if isinstance(names, str) else set(names or ())
    flags: list[bool] = []
    for at, arg in enumerate(args):
        flags += [at in chosen] * len(tree_util.tree_leaves(arg))
    for name in sorted(kwargs):
        flags += [name in named] * len(tree_util.tree_leaves(kwargs[name]))
    return flags


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))
