"""`remat`: a function under jit within a budget for its temporaries, whatever it computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Generic, Literal, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from jax import tree_util
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._emit.gates import Gate
from recompute_jax._program.jaxpr import struct
from recompute_jax._program.signature import Signature
from recompute_jax._program.text import short
from recompute_jax._remat.compile import Argument
from recompute_jax._remat.differentiated import Call, PlannedCall
from recompute_jax._remat.followed import follow_saved
from recompute_jax._remat.options import Options, Requested, checked, parsed
from recompute_jax._remat.planned import Planned
from recompute_jax._remat.report import RematPlan
from recompute_jax._remat.saved import SavedPlan
from recompute_jax._remat.search import make

_NOT_TRACEABLE: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_Shardings = tuple[tuple[int, Any], ...]

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
        In the place of a budget: a plan of this function, from `.plan(...)` or the file that it was saved to. Nothing
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


class Remat(Generic[P, R]):
    """What `remat` returns: call it like the function."""

    def __init__(self, fn: Callable[P, R], requested: Requested, jit_options: dict[str, Any]) -> None:
        update_wrapper(self, fn, updated=())
        self._fn = fn
        self._run = _released(fn)
        self._signature = Signature(fn, jit_options["static_argnums"], jit_options["static_argnames"])
        self._requested = requested
        self._jit_options = jit_options
        self._known: dict[Any, _Traced] = {}
        self._jits: dict[tuple[bool, _Shardings], Any] = {}
        """Part of something that JAX transforms or compiles, or compiled here, for arguments on these devices."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = self._hold(args, kwargs)
        inside = _is_inside(args, kwargs)
        return self._jitted(inside, () if inside else _shardings(args, kwargs))(*args, **kwargs)  # type: ignore[no-any-return]  # of `jax.jit`, which forgets it

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> RematPlan:
        """What is planned for such arguments (arrays, or `jax.ShapeDtypeStruct`); it prints as a report."""
        found: list[Planned] = []
        args, kwargs = self._hold(args, kwargs)
        inside = _is_inside(args, kwargs)
        shardings = () if inside else _shardings(args, kwargs)

        def look(*args: Any, **kwargs: Any) -> int:
            found.append(self._plan_for(self._trace(args, kwargs, inside, shardings)))
            return 0

        update_wrapper(look, self._fn, updated=())
        jax.jit(look, **_static(self._jit_options)).trace(*args, **kwargs)
        return found[0].report

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and trace, as `jax.jit(fn).trace` does."""
        args, kwargs = self._hold(args, kwargs)
        return self._jitted(False, _shardings(args, kwargs)).trace(*args, **kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The types of the results, as `jax.jit(fn).eval_shape` gives them; nothing is planned."""
        args, kwargs = self._hold(args, kwargs)
        plain: Any = jax.jit(_released(self._fn), **_static(self._jit_options))
        return plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and what was compiled, as `jax.jit(fn).clear_cache` does."""
        self._known.clear()
        self._jits.clear()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Plan and lower, as `jax.jit(fn).lower` does."""
        args, kwargs = self._hold(args, kwargs)
        return self._jitted(False, _shardings(args, kwargs)).lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, if it is found on an instance: as functions are."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        requested = self._requested
        return f"<remat of {_name(self._fn)} within {requested.share if requested.size is None else requested.size}>"

    def _hold(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Functions among the leaves, as modules of equinox have, are part of the structure: they are not traced."""
        if not any(map(_is_function, tree_util.tree_leaves((args, kwargs)))):
            return args, kwargs
        dynamic = self._signature.without(args, kwargs)
        return self._signature.filled(args, kwargs, tree_util.tree_map(_held, dynamic))

    def _jitted(self, inside: bool, shardings: _Shardings) -> Any:
        jitted = self._jits.get((inside, shardings))
        if jitted is None:
            options = None if inside else self._requested.compiler_options() or None
            following = self._following(inside, shardings)
            jitted = jax.jit(following, compiler_options=options, **self._jit_options)
            self._jits[inside, shardings] = jitted
        return jitted

    def _following(self, inside: bool, shardings: _Shardings) -> Callable[..., Any]:
        def follow(*args: Any, **kwargs: Any) -> Any:
            if jax.config.values["jax_disable_jit"] or _clean():  # JAX looks for the operation that made a NaN
                return self._run(*args, **kwargs)
            traced = self._trace(args, kwargs, inside, shardings)
            if inside and not traced.closed.effects:
                return tree_util.tree_unflatten(traced.tree, traced.call(*traced.closed.consts, *traced.leaves))
            planned = self._plan_for(traced)
            if planned.emitted is None:
                return self._run(*args, **kwargs)
            return tree_util.tree_unflatten(traced.tree, planned(traced.leaves))

        update_wrapper(follow, self._fn, updated=())
        return follow

    def _trace(self, args: Any, kwargs: Any, inside: bool, shardings: _Shardings) -> _Traced:
        """The function for such arguments. Called while JAX traces."""
        given, structure = tree_util.tree_flatten((args, kwargs))
        dynamic = [isinstance(each, jax.core.Tracer) for each in given]
        leaves = [each for each, traced in zip(given, dynamic, strict=True) if traced]
        fixed = [None if traced else each for each, traced in zip(given, dynamic, strict=True)]

        def run(*values: Any) -> Any:
            fill = iter(values)
            whole = [next(fill) if traced else each for each, traced in zip(fixed, dynamic, strict=True)]
            args, kwargs = tree_util.tree_unflatten(structure, whole)
            return self._run(*args, **kwargs)

        update_wrapper(run, self._fn, updated=())  # JAX's errors name the function and its line
        avals = [jax.typeof(each) for each in leaves]
        for aval in avals:
            if not all(isinstance(size, int) for size in aval.shape):
                raise ValueError(
                    f"{_name(self._fn)}: remat counts bytes, so shapes must be numbers, not those of {short(aval)}: "
                    "export a planned function for each shape, or the function without remat"
                )
        key = inside, shardings, *_signature(args, kwargs), tuple(avals), jax.default_backend(), _context()
        known = self._known.get(key)
        if known is not None:
            return known._replace(leaves=leaves)
        try:
            closed, shape = jax.make_jaxpr(run, return_shape=True)(*map(struct, avals))
        except _NOT_TRACEABLE as error:
            error.add_note(
                f"recompute_jax.remat traces {_name(self._fn)} as jax.jit does, without values: use lax.cond or "
                "jnp.where for what depends on them, or static_argnums"
            )
            raise
        donated = _donated(args, kwargs, self._jit_options)
        places = dict(shardings)
        flags = [Argument(donated[at], places.get(at)) for at, traced in enumerate(dynamic) if traced]
        call = self._call(closed, avals, inside)
        found = _Traced(closed, tree_util.tree_structure(shape), flags, leaves, call, [], inside)
        if not any(isinstance(each, jax.core.Tracer) for each in closed.consts):
            self._known[key] = found._replace(leaves=[])
        return found

    def _call(self, closed: ClosedJaxpr, avals: Sequence[Any], inside: bool) -> PlannedCall:
        """The function as one operation of its constants and arguments."""
        count = len(closed.consts)
        types = [*map(jax.typeof, closed.consts), *avals]
        whole = jax.make_jaxpr(lambda *all: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, all[:count]))(*all[count:]))
        name, options, saved = _name(self._fn), self._requested.options(inside), self._requested.saved
        derived = f"the gradient of {name}"
        return PlannedCall(
            Call(
                whole(*map(struct, types)),
                lambda each: _make(saved, each, name, options, [Argument()] * len(types)),
                lambda each: make(each, derived, options, [Argument()] * len(each.in_avals)),
            ),
            types,
        )

    def _plan_for(self, traced: _Traced) -> Planned:
        if not traced.planned:
            options = self._requested.options(traced.inside)
            saved = self._requested.saved
            traced.planned.append(_make(saved, traced.closed, _name(self._fn), options, traced.arguments))
        return traced.planned[0]


class _Traced(NamedTuple):
    """The function for arguments of some types."""

    closed: ClosedJaxpr
    tree: Any
    """The structure of the results."""
    arguments: list[Argument]
    leaves: list[Any]
    """Its arguments."""
    call: PlannedCall
    planned: list[Planned]
    """The plan, once it is made."""
    inside: bool


def _make(
    saved: SavedPlan | None, closed: ClosedJaxpr, name: str, options: Options, arguments: Sequence[Argument]
) -> Planned:
    if saved is None:
        return make(closed, name, options, arguments)
    return follow_saved(closed, name, saved, options, arguments)


def _is_inside(args: Any, kwargs: Any) -> bool:
    """Whether JAX transforms or compiles what calls this."""
    if any(isinstance(each, jax.core.Tracer) for each in tree_util.tree_leaves((args, kwargs))):
        return True
    return not _clean()


@tree_util.register_static
class _Held:
    """A function in the place of an array."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __hash__(self) -> int:
        return hash(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and bool(self.function == other.function)


def _is_function(leaf: Any) -> bool:
    return callable(leaf) and not hasattr(leaf, "dtype") and not hasattr(leaf, "__jax_array__")


def _held(leaf: Any) -> Any:
    return _Held(leaf) if _is_function(leaf) else leaf


def _released(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arguments in which functions are held."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_util.tree_map(
            lambda each: each.function if isinstance(each, _Held) else each,
            (args, kwargs),
            is_leaf=lambda each: isinstance(each, _Held),
        )
        return fn(*args, **kwargs)

    update_wrapper(run, fn, updated=())
    return run


def _shardings(args: Any, kwargs: Any) -> _Shardings:
    """Of the leaves that are on several devices, by number."""
    found: list[tuple[int, Any]] = []
    for at, leaf in enumerate(tree_util.tree_leaves((args, kwargs))):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1:
            found.append((at, sharding))
    return tuple(found)


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
