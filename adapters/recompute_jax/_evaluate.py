"""Op by op: any function that JAX can trace runs equation by equation through the cache.

A function is traced as by `jax.jit`, its jaxpr is flattened and prepared once, and then each equation is an operation:
what it makes may be evicted and recomputed. Variables are dropped at their last use, as in JAX's own interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

import recompute as rc
from recompute._graph import EVICTED
from recompute_jax._adapter import Outline, adapter
from recompute_jax._devices import spread
from recompute_jax._jaxpr import effects, flatten, last_uses
from recompute_jax._kernels import Kernel, variables

Handle = rc.Recomputable[Any]


def evaluate(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, run equation by equation within the budget of the cache; plain arrays come back.

    `op_by_op` with its defaults, applied at once. As with `jax.jit`, what was traced is found again if `fn` is the same
    object: write `grad = jax.grad(loss)` before a loop, not `evaluate(jax.grad(loss), ...)` in it.
    """
    return op_by_op(fn)(*args, **kwargs)


def op_by_op(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    unroll_scans: bool = False,
    recomputable: bool = False,
    measure: bool = False,
) -> Callable[..., Any]:
    """A function with the signature of `fn` that runs equation by equation through the current cache.

    Arguments are trees of arrays, of Recomputables that hold arrays (also evicted ones: they are brought back when they
    are needed), or both; the cache of the Recomputables serves. Nested `jit`, `checkpoint` and custom derivatives are
    inlined; `cond`, `while_loop` and `scan` are one operation each. What an equation with effects makes is kept, so
    that effects happen once. Nothing is donated.

    Parameters
    ----------
    static_argnums, static_argnames
        As for `jax.jit`.
    unroll_scans
        Run the equations in the body of a `scan`, step by step, so that carries and what steps leave for the backward
        pass are evicted and recomputed one by one. Takes tens of microseconds for each equation of each step; without,
        a `scan` is compiled, and what it stacks is one array.
    recomputable
        Return RecomputableArrays, which may be evicted, in the place of arrays.
    measure
        Wait for each operation, and take the time as its cost. Without, each kind of equation is timed when it first
        runs.

    Raises TypeError for traced values, and for what JAX does not take; NotImplementedError for mutable arrays;
    BudgetError if operands and results of one equation do not fit; and whatever tracing raises. The first call for a
    signature traces, and compiles each kind of equation; an operation costs some tens of microseconds (docs/jax.md).
    """
    statics = _Statics(fn, static_argnums, static_argnames)
    jitted = jax.jit(fn, static_argnums=static_argnums, static_argnames=static_argnames)

    @wraps(fn)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        with jax.core.eval_context():
            dynamic = statics.without(args, kwargs)
            leaves, tree = jax.tree.flatten(dynamic, is_leaf=_is_handle)
            specs = jax.tree.unflatten(tree, [_spec(each) for each in leaves])
            positional, named = statics.filled(args, kwargs, specs)
            traced = jitted.trace(*positional, **named)
            program = _prepared(traced.jaxpr, unroll_scans, measure)
            del args, kwargs, dynamic, specs, positional, named
            cache = next((each._cache for each in leaves if _is_handle(each)), None)
            if cache is None or cache is rc.current_cache():
                results = _Run().everything(program, leaves, recomputable)
            else:
                with cache:
                    results = _Run().everything(program, leaves, recomputable)
            return jax.tree.unflatten(traced.out_tree, results)

    return evaluated


class Step(NamedTuple):
    """One equation to run. Numbers are places in the list of what is alive."""

    kernel: Kernel
    operands: tuple[int, ...]
    results: tuple[int, ...]  # -1: nobody needs it
    dying: tuple[int, ...]
    once: bool  # it has effects
    scan: Scan | None


class Scan(NamedTuple):
    """A scan that runs step by step."""

    body: Program
    operands: tuple[int | Literal, ...]
    consts: int
    carries: int
    length: int
    reverse: bool


class Program:
    """A flattened jaxpr, ready to run."""

    __slots__ = ("consts", "inputs", "outputs", "places", "steps")

    def __init__(self, closed: ClosedJaxpr, unroll_scans: bool, measure: bool) -> None:
        flat = flatten(closed, inline_custom=True)
        place: dict[Var, int] = {}
        for var in (*flat.constvars, *flat.invars):
            place[var] = len(place)
        dying = last_uses(flat)
        used = {each for equation in flat.equations for each in variables(equation)}
        used.update(each for each in flat.outvars if isinstance(each, Var))
        for equation, dead in zip(flat.equations, dying, strict=True):
            for var in equation.outvars:
                if var not in dead:
                    place[var] = len(place)
        self.steps = [
            _step(equation, dead, place, unroll_scans, measure)
            for equation, dead in zip(flat.equations, dying, strict=True)
        ]
        self.consts = [
            (const, place[var]) for var, const in zip(flat.constvars, flat.consts, strict=True) if var in used
        ]
        self.inputs = [place[var] if var in used else -1 for var in flat.invars]
        self.outputs = [each if isinstance(each, Literal) else place[each] for each in flat.outvars]
        self.places = len(place)


def _step(equation: JaxprEqn, dead: tuple[Var, ...], place: dict[Var, int], unroll_scans: bool, measure: bool) -> Step:
    params = equation.params
    scan = None
    if unroll_scans and equation.primitive.name == "scan" and params["length"] > 1:
        scan = Scan(
            Program(params["jaxpr"], unroll_scans, measure),
            tuple([each if isinstance(each, Literal) else place[each] for each in equation.invars]),
            params["num_consts"],
            params["num_carry"],
            params["length"],
            params["reverse"],
        )
    return Step(
        Kernel(equation, measure),
        tuple([place[each] for each in variables(equation)]),
        tuple([place.get(each, -1) for each in equation.outvars]),
        tuple([place[each] for each in dead if each in place]),
        bool(effects(equation)),
        scan,
    )


_programs: Final[WeakKeyDictionary[ClosedJaxpr, dict[tuple[bool, bool], Program]]] = WeakKeyDictionary()
"""By what JAX traced, which it keeps for as long as the function lives."""


def _prepared(closed: ClosedJaxpr, unroll_scans: bool, measure: bool) -> Program:
    ways = _programs.setdefault(closed, {})
    program = ways.get((unroll_scans, measure))
    if program is None:
        program = ways[unroll_scans, measure] = Program(closed, unroll_scans, measure)
    return program


class _Stacked:
    """What the steps of a scan left, one value for each, before anybody needs them as one array."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class _Run:
    """One evaluation."""

    def __init__(self) -> None:
        self._consts: dict[Program, list[Handle]] = {}
        self._limited = rc.current_cache().budget is not None

    def everything(self, program: Program, leaves: list[Any], recomputable: bool) -> list[Any]:
        """From the leaves of the arguments to those of the results. `leaves` is emptied: its values die in time."""
        inputs = [None if place < 0 else _source(each) for each, place in zip(leaves, program.inputs, strict=True)]
        leaves.clear()
        self._consts[program] = [_source(const) for const, _ in program.consts]
        # The sizes of results are known beforehand, if they do not depend on how they are spread over devices.
        if any(
            spread(each._value.storage.pool.device) for each in (*inputs, *self._consts[program]) if each is not None
        ):
            self._limited = False
        results = self.run(program, inputs)
        for number in range(len(results)):
            whole = _whole(results[number])
            results[number] = rc.array(whole) if recomputable else whole.get()
            del whole
        return results

    def run(self, program: Program, inputs: list[Any]) -> list[Any]:
        """The outputs, each a handle or what is stacked later. `inputs` is emptied."""
        alive: list[Any] = [None] * program.places
        if program.consts:
            known = self._consts.get(program)
            if known is None:
                known = self._consts[program] = [_source(const) for const, _ in program.consts]
            for (_, place), handle in zip(program.consts, known, strict=True):
                alive[place] = handle
        for place, handle in zip(program.inputs, inputs, strict=True):
            if place >= 0:
                alive[place] = handle
        inputs.clear()
        limited = self._limited
        for kernel, operands, results, dying, once, scan in program.steps:
            made: Any
            if scan is not None:
                made = self._scan(scan, alive, dying)
            elif once:
                made = _run_once(kernel, [_handle(alive, each) for each in operands])
            elif len(results) == 1:
                handles = [_handle(alive, each) for each in operands]
                made = (rc.ap(kernel, *handles, nbytes=kernel.nbytes) if limited else rc.ap(kernel, *handles),)
                del handles
            else:
                handles = [_handle(alive, each) for each in operands]
                made = rc.ap(kernel, *handles, nout=len(results), nbytes=kernel.nbytes if limited else None)
                del handles
            for place, each in zip(results, made, strict=True):
                if place >= 0:
                    alive[place] = each
            each = made = None
            for place in dying:
                alive[place] = None
        return [_literal(each) if isinstance(each, Literal) else alive[each] for each in program.outputs]

    def _scan(self, scan: Scan, alive: list[Any], dying: tuple[int, ...]) -> list[Any]:
        """The carries in the end, and what the steps leave, still in pieces."""
        operands = [_literal(each) if isinstance(each, Literal) else alive[each] for each in scan.operands]
        consts = [_whole(each) for each in operands[: scan.consts]]
        carries = [_whole(each) for each in operands[scan.consts : scan.consts + scan.carries]]
        rows = operands[scan.consts + scan.carries :]
        mortal = {id(alive[each]) for each in dying}
        dead = [each.parts for each in rows if isinstance(each, _Stacked) and id(each) in mortal]
        del operands
        for place in dying:
            alive[place] = None
        left: list[_Stacked] = [_Stacked([None] * scan.length) for _ in scan.body.outputs[scan.carries :]]
        steps = range(scan.length)
        for number in reversed(steps) if scan.reverse else steps:
            row = [each.parts[number] if isinstance(each, _Stacked) else _row(each, number) for each in rows]
            for parts in dead:
                parts[number] = None
            results = self.run(scan.body, [*consts, *carries, *row])
            del row
            carries = [_whole(each) for each in results[: scan.carries]]
            for stacked, each in zip(left, results[scan.carries :], strict=True):
                stacked.parts[number] = _whole(each)
            del results
            each = None
        return [*carries, *left]


class _Statics:
    """Which arguments are static: numbers and names, each found from the other, as `jax.jit` does."""

    def __init__(
        self, fn: Callable[..., Any], numbers: int | Sequence[int] | None, names: str | Iterable[str] | None
    ) -> None:
        self._numbers = {numbers} if isinstance(numbers, int) else set(numbers or ())
        self._names = {names} if isinstance(names, str) else set(names or ())
        if (numbers is None) == (names is None):
            return  # none, or the caller has said both
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            return
        for number, each in enumerate(parameters):
            if each.kind is each.POSITIONAL_OR_KEYWORD:
                if number in self._numbers:
                    self._names.add(each.name)
                elif each.name in self._names:
                    self._numbers.add(number)

    def without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The dynamic arguments."""
        return (
            [each for number, each in enumerate(args) if not self._static(number, len(args))],
            {name: each for name, each in kwargs.items() if name not in self._names},
        )

    def filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: tuple[list[Any], dict[str, Any]]
    ) -> tuple[list[Any], dict[str, Any]]:
        """All arguments, with others in the place of the dynamic ones."""
        rest = iter(dynamic[0])
        positional = [each if self._static(number, len(args)) else next(rest) for number, each in enumerate(args)]
        return positional, {**kwargs, **dynamic[1]}

    def _static(self, number: int, count: int) -> bool:
        return bool({number, number - count} & self._numbers)


def _is_handle(leaf: Any) -> bool:
    return isinstance(leaf, rc.Recomputable)


def _spec(leaf: Any) -> Any:
    """What stands for an argument when the function is traced; nothing is recomputed for it."""
    if not _is_handle(leaf):
        if isinstance(leaf, (jax.core.Tracer, jax.ref.Ref)):
            adapter.check(leaf)  # raises
        return leaf
    value = leaf._value
    payload, outline = value.payload, getattr(value, "outline", None)
    if payload is EVICTED and isinstance(outline, Outline):
        aval = outline.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=outline.sharding)  # type: ignore[no-untyped-call]
    if payload is EVICTED:
        payload = rc.Recomputable.get(leaf)
    if not hasattr(payload, "dtype") and not isinstance(payload, (int, float, complex)):
        raise TypeError(
            f"an argument is a Recomputable of a {type(payload).__name__}, not of an array; pass a tree of "
            "Recomputables instead: recompute_jax.ap gives those"
        )
    return payload


def _source(leaf: Any) -> Handle:
    """A leaf of the arguments as a handle that nobody else can let refer to something else."""
    if not _is_handle(leaf):
        return rc.pure(jax.numpy.asarray(leaf))
    cache, value = leaf._cache, leaf._value
    if not isinstance(value.payload, jax.Array) and not isinstance(getattr(value, "outline", None), Outline):
        return rc.ap(jax.numpy.asarray, leaf)  # type: ignore[no-any-return]  # NumPy's, or a number
    with cache._noting, cache._lock:
        value.refs += 1
    return rc.Recomputable(cache, value)


def _literal(literal: Literal) -> Handle:
    return rc.pure(jax.numpy.asarray(literal.val))


def _handle(alive: list[Any], place: int) -> Handle:
    """What is at a place, as one value."""
    each = alive[place]
    if type(each) is _Stacked:
        each = alive[place] = _whole(each)
    return each  # type: ignore[no-any-return]


def _whole(each: Any) -> Handle:
    """One value of what a scan has left in pieces."""
    return rc.ap(_stack, *each.parts) if type(each) is _Stacked else each  # type: ignore[no-any-return]


def _stack(*parts: Any) -> Any:
    with jax.core.eval_context():
        return jax.lax.concatenate([jax.lax.expand_dims(each, (0,)) for each in parts], 0)  # keeps weak types


def _row(rows: Handle, number: int) -> Handle:
    return rc.ap(_at, rows, number)  # type: ignore[no-any-return]


def _at(rows: Any, number: int) -> Any:
    with jax.core.eval_context():
        return jax.lax.dynamic_index_in_dim(rows, np.int32(number), keepdims=False)


def _run_once(kernel: Kernel, operands: list[Handle]) -> list[Handle]:
    """What has effects runs now and never again: its results are sources."""
    results = kernel.run(tuple([each.get() for each in operands]))
    return [rc.pure(each) for each in ([results] if len(kernel.nbytes) == 1 else results)]
