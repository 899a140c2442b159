"""Op by op: any function that JAX can trace runs equation by equation through the cache.

A function is traced as by `jax.jit`, its jaxpr is flattened and prepared once, and then each equation is an operation:
what it makes may be evicted and recomputed. Variables are dropped at their last use, as in JAX's own interpreter.
What callers pass may be static or not, stands for itself when it is traced, or is refused with its name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import wraps
from traceback import walk_tb
from types import CodeType
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.extend import source_info_util
from jax.extend.core import Literal

import recompute as rc
from recompute.extend import EVICTED, common_engine, node_of, outline_of
from recompute_jax._arrays import Outline, adapter, default_pool, spread
from recompute_jax._eager.kernels import Kernel, Program, Scan, prepared
from recompute_jax._program.calls import Chosen
from recompute_jax._program.jaxpr import INTERNAL, refuse_ref

_CURE: Final = (
    "as under jax.jit there are no values yet; use jnp.where, jax.lax.cond or while_loop instead of if and while, "
    "sizes that do not depend on values, jax.pure_callback for NumPy, and static_argnums of recompute_jax.op_by_op"
)


def is_handle(leaf: Any) -> bool:
    """Whether a leaf of the arguments is a Recomputable."""
    return isinstance(leaf, rc.Recomputable)


def spec(leaf: Any) -> Any:
    """What stands for an argument when the function is traced; nothing is recomputed for it."""
    if not is_handle(leaf):
        if isinstance(leaf, jax.core.Tracer):
            adapter.check(leaf)  # raises
        if isinstance(leaf, jax.ref.Ref):
            refuse_ref(jax.typeof(leaf))  # raises
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError("it is a ShapeDtypeStruct, which has no content; pass an array")
        return leaf
    payload, outline = node_of(leaf).payload, outline_of(node_of(leaf))
    if payload is EVICTED and isinstance(outline, Outline):
        aval = outline.aval
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]  # JAX's
            aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=outline.sharding
        )
    if payload is EVICTED:
        payload = rc.Recomputable.get(leaf)
    if not hasattr(payload, "dtype") and not isinstance(payload, (int, float, complex)):
        raise TypeError(
            f"it is a Recomputable of a {type(payload).__name__}, not of an array; pass a tree of Recomputables "
            "instead: recompute_jax.ap gives those"
        )
    return payload


def source(cache: rc.Cache, leaf: Any) -> rc.Recomputable[Any]:
    """A leaf of the arguments as a handle in `cache` that cannot be made to refer to something else."""
    if not is_handle(leaf):
        return rc.pure(jax.numpy.asarray(leaf))
    common_engine(cache.extend.engine, leaf)  # raises, if that is another one
    node = node_of(leaf)
    if not isinstance(node.payload, jax.Array) and not isinstance(outline_of(node), Outline):
        return rc.ap(jax.numpy.asarray, leaf)  # it is NumPy's, or a number
    return rc.Recomputable(cache, node)


def named(fn: Callable[..., Any]) -> str:
    """A function and where it was written."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def specs(fn: Callable[..., Any], leaves: Sequence[Any], arguments: Any) -> list[Any]:
    """`spec` of each leaf; an error names the argument, `arguments` being the tree of the leaves."""
    stand_ins: list[Any] = []
    for leaf in leaves:
        try:
            stand_ins.append(spec(leaf))
        except (TypeError, NotImplementedError) as error:
            path, _ = tree_util.tree_flatten_with_path(arguments, is_leaf=is_handle)[0][len(stand_ins)]
            which = ("args", "kwargs")[path[0].idx] + tree_util.keystr(path[1:])
            raise type(error)(f"{which} of {named(fn)}: {error}") from None
    return stand_ins


def traced(fn: Callable[..., Any], jitted: Any, args: Sequence[Any], kwargs: dict[str, Any], count: int) -> Any:
    """`jitted.trace`, with a note on what it raises. `count`: leaves of the arguments.

    Raises TypeError if the function uses a traced value that it was not given.
    """
    try:
        traced = jitted.trace(*args, **kwargs)
    except Exception as error:
        frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
        own = [(code, line) for code, line in frames if not code.co_filename.startswith((*INTERNAL, "<frozen"))]
        where = "".join(f"at {code.co_filename}:{line} ({code.co_name}), " for code, line in own[-1:])
        cure = f": {_CURE}" if type(error).__module__.startswith("jax") else ""
        error.add_note(f"{where}while recompute_jax traced {named(fn)}{cure}")
        raise
    strange = traced.jaxpr.jaxpr.invars[count:]
    for var in strange:
        used = next(equation for equation in traced.jaxpr.eqns if var in equation.invars)
        raise TypeError(
            f"{named(fn)} uses a traced value ({var.aval.str_short()}) that it was not given, in "
            f"{used.primitive.name} ({source_info_util.summarize(used.source_info)}): there is no value to evaluate "
            "with; pass it as an argument, and evaluate around jax.jit, grad, vmap, scan and the like, not in them"
        )
    return traced


Handle = rc.Recomputable[Any]


def evaluate(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, run equation by equation within the budget of the cache; plain arrays come back.

    `op_by_op` with its defaults, applied. As with `jax.jit`, what was traced is used again if `fn` is the same
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
        Return RecomputableArrays, which may be evicted, instead of arrays.
    measure
        Wait for each operation, and take the time as its cost. Without, each kind of equation is timed when it first
        runs.

    Raises TypeError for traced values, and for what JAX does not take; NotImplementedError for mutable arrays;
    BudgetError if operands and results of one equation do not fit; and whatever tracing raises. The first call for a
    signature traces, and compiles each kind of equation; an operation costs some tens of microseconds (docs/jax.md).
    """
    static = Chosen(fn, static_argnums, static_argnames)
    jitted = jax.jit(fn, static_argnums=static_argnums, static_argnames=static_argnames)

    @wraps(fn)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        place = place_of_caller()
        with jax.core.eval_context():
            dynamic = static.without(args, kwargs)
            leaves, tree = jax.tree.flatten(dynamic, is_leaf=is_handle)
            positional, named = static.filled(args, kwargs, jax.tree.unflatten(tree, specs(fn, leaves, dynamic)))
            made = traced(fn, jitted, positional, named, len(leaves))
            program = prepared(made.jaxpr, unroll_scans=unroll_scans, measure=measure)
            out_tree = made.out_tree
            del args, kwargs, dynamic, positional, named, made
            cache = next((leaf.cache for leaf in leaves if is_handle(leaf)), rc.current_cache())
            with nullcontext() if cache is rc.current_cache() else cache:
                results = Run(place, cache).everything(program, leaves, recomputable=recomputable)
            return jax.tree.unflatten(out_tree, results)

    return evaluated


class _Stacked:
    """What the steps of a scan left, one value for each, before anybody needs them as one array."""

    __slots__ = ("nbytes", "parts")

    def __init__(self, length: int, nbytes: int) -> None:
        self.parts: list[Any] = [None] * length
        self.nbytes = nbytes  # of all together


class Run:
    """One evaluation."""

    def __init__(self, place: tuple[CodeType, int], cache: rc.Cache) -> None:
        self._cache = cache
        self._place = place  # where operations are created, for those who read of them
        self._consts: dict[Program, list[Handle]] = {}
        self._limited = self._cache.budget is not None  # results have declared sizes
        self._stacks = False  # there may be some

    def everything(self, program: Program, leaves: list[Any], *, recomputable: bool) -> list[Any]:
        """From the leaves of the arguments to those of the results. `leaves` is emptied: its values die in time."""
        inputs = [
            None if place < 0 else source(self._cache, leaf) for leaf, place in zip(leaves, program.inputs, strict=True)
        ]
        leaves.clear()
        # The sizes of results are known beforehand, if they do not depend on how they are spread over devices.
        given = [
            node_of(handle).storage.pool.device for handle in (*inputs, *self._constants(program)) if handle is not None
        ]
        if any(map(spread, given)) or (program.moves and jax.device_count() > 1):
            self._limited = False
        results = self.run(program, inputs)
        for number in range(len(results)):
            whole = self._whole(results[number])
            results[number] = rc.array(whole) if recomputable else whole.get()
            del whole
        return results

    def run(self, program: Program, inputs: list[Any]) -> list[Any]:
        """The outputs, each a handle or what is stacked later. `inputs` is emptied."""
        alive: list[Any] = [None] * program.places
        for (_, place), handle in zip(program.consts, self._constants(program), strict=True):
            alive[place] = handle
        for place, handle in zip(program.inputs, inputs, strict=True):
            if place >= 0:
                alive[place] = handle
        inputs.clear()
        for kernel, operands, results, dying, scan in program.steps:
            if scan is not None:
                made: Any = self._scan(scan, alive, dying)
            else:
                if self._stacks:
                    for place in operands:
                        alive[place] = self._whole(alive[place])
                handles = [alive[place] for place in operands]
                made = _run_once(kernel, handles) if kernel.once else self._apply(kernel, handles, kernel.nbytes)
                del handles
            for place, value in zip(results, made, strict=True):
                if place >= 0:
                    alive[place] = value
            value = made = None
            for place in dying:
                alive[place] = None
        return [_literal(output) if isinstance(output, Literal) else alive[output] for output in program.outputs]

    def _constants(self, program: Program) -> list[Handle]:
        known = self._consts.get(program)
        if known is None:
            known = self._consts[program] = [source(self._cache, const) for const, _ in program.consts]
        return known

    def _scan(self, scan: Scan, alive: list[Any], dying: tuple[int, ...]) -> list[Any]:
        """The carries in the end, and what the steps leave, still in pieces."""
        self._stacks = True
        operands = [_literal(operand) if isinstance(operand, Literal) else alive[operand] for operand in scan.operands]
        consts = [self._whole(operand) for operand in operands[: scan.consts]]
        carries = [self._whole(operand) for operand in operands[scan.consts : scan.consts + scan.carries]]
        rows = operands[scan.consts + scan.carries :]
        mortal = {id(alive[place]) for place in dying}
        dead = [row.parts for row in rows if isinstance(row, _Stacked) and id(row) in mortal]
        del operands
        for place in dying:
            alive[place] = None
        left = [_Stacked(scan.length, nbytes) for nbytes in scan.stacks]
        steps = range(scan.length)
        for number in reversed(steps) if scan.reverse else steps:
            row = [
                row.parts[number]
                if isinstance(row, _Stacked)
                else self._apply(_row_of_scan, [row], (nbytes,), number)[0]
                for row, nbytes in zip(rows, scan.rows, strict=True)
            ]
            for parts in dead:
                parts[number] = None
            results = self.run(scan.body, [*consts, *carries, *row])
            del row
            carries = [self._whole(value) for value in results[: scan.carries]]
            for stacked, value in zip(left, results[scan.carries :], strict=True):
                stacked.parts[number] = self._whole(value)
            del results
            value = None
        return [*carries, *left]

    def _whole(self, value: Any) -> Handle:
        """One value of what a scan has left in pieces."""
        return self._apply(_stack_of_scan, value.parts, (value.nbytes,))[0] if type(value) is _Stacked else value

    def _apply(
        self, function: Callable[..., Any], operands: list[Handle], nbytes: tuple[int, ...], *rest: Any
    ) -> list[Handle]:
        """`rc.ap` of operands and then constants, as if called where the evaluation was asked for."""
        nodes = tuple([node_of(operand) for operand in operands])
        positional = (*nodes, *rest) if rest else nodes
        declared = nbytes if self._limited else None
        return self._cache.extend.run(
            function,
            positional,
            nodes,
            self._place,
            handle=rc.Recomputable,
            nout=len(nbytes),
            nbytes=declared,
            device=None if nodes else default_pool(),
        )


def place_of_caller() -> tuple[CodeType, int]:
    """The code that called JAX or this library, and which instruction of it."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(INTERNAL) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _literal(literal: Literal) -> Handle:
    return rc.pure(jax.numpy.asarray(literal.val))


def _stack_of_scan(*parts: Any) -> Any:
    with jax.core.eval_context():
        return jax.lax.concatenate([jax.lax.expand_dims(part, (0,)) for part in parts], 0)  # keeps weak types


def _row_of_scan(rows: Any, number: int) -> Any:
    with jax.core.eval_context():
        return jax.lax.dynamic_index_in_dim(rows, np.int32(number), keepdims=False)


def _run_once(kernel: Kernel, operands: list[Handle]) -> list[Handle]:
    """What has effects runs now and never again: its results are sources."""
    try:
        results = kernel.run(tuple([operand.get() for operand in operands]))
    except Exception as error:
        error.add_note(f"in {kernel.__name__}, which has effects: it runs once")
        raise
    return [rc.pure(result) for result in ([results] if len(kernel.nbytes) == 1 else results)]
