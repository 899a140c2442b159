"""A budget for plain JAX code that runs op by op: `with recompute_jax.budget("2GB"):`.

Inside the block JAX hands each primitive to a `Trace`, as it does inside `grad` or `vmap`. This one runs it through the
cache, and gives back a `Live` value: it counts as a `jax.Array`, and its bytes may be evicted and recomputed.
Nothing of JAX is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Self

import jax
import numpy as np
from jax._src.interpreters.pxla import shard_arg_handlers  # `jax.device_put` looks nowhere else
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Primitive, find_top_trace, set_current_trace, take_current_trace

import recompute as rc
from recompute.extend import EVICTED, Value, leave_in_steps, node_of
from recompute_jax._eager.evaluate import Run, place_of_caller
from recompute_jax._eager.kernels import EVAL, prepared
from recompute_jax._program.jaxpr import lifted, refuse_ref

_config: Any = jax.config  # which has no types
_FEW: Final = 64  # sources, up to which empty ones stay


class budget:
    """A block in which JAX's operations run within a budget: `jax.numpy`, `jax.lax`, `jax.grad`, functions under `jit`.

    Each primitive is an operation of the block's cache, as in `evaluate`. What it makes is a `jax.Array` to JAX and to
    `isinstance`, and may be evicted until it is needed. `numpy.asarray(x)`, `float(x)` and `block.get(tree)` give
    its value. After the block, values can be used as plain arrays. `scan`, `while_loop`, `cond` and `shard_map` are one
    operation each. The block is for the thread that enters it.

    Parameters
    ----------
    budget
        Bytes, or a mapping from device to bytes, as for `recompute.Cache`; None: unlimited.
    options
        As for `recompute.Cache`.

    Raises BudgetError if operands and results of one operation do not fit; RuntimeError if it is opened where JAX
    traces. An operation takes about a tenth of a millisecond more than in JAX, and some milliseconds when its kind and
    shapes are new.
    """

    def __init__(self, budget: Any = None, **options: Any) -> None:
        self.cache: Final = rc.Cache(budget, **options)
        self._trace = _Trace(self.cache)

    def __enter__(self) -> Self:
        with take_current_trace() as around:
            nothing_is_traced = isinstance(around, (type(EVAL), _Trace))
        if not nothing_is_traced:
            raise RuntimeError(
                "a budget block cannot be opened while JAX traces (inside of jax.jit, grad, vmap, scan and the like): "
                "open it around them, or use recompute_jax.planned there"
            )
        self.cache.__enter__()
        try:
            self._trace.around.append(around)
            set_current_trace(self._trace).__enter__()  # type: ignore[no-untyped-call]  # JAX's
        except BaseException:
            leave_in_steps(self)
            raise
        return self

    def leaving(self) -> Iterable[Callable[[], object]]:
        """What ends the innermost entry, in steps that can be done again: see `leave_in_steps`."""
        entries = self._trace.around
        if not entries:
            raise RuntimeError("this budget block is left once for each time that it is entered, and it is not entered")
        return (
            set_current_trace(entries[-1]).__enter__,  # type: ignore[no-untyped-call]  # JAX's
            partial(entries.__delitem__, slice(len(entries) - 1, None)),
            self.cache.__exit__,
        )

    __exit__ = leave_in_steps

    @property
    def budget(self) -> Any:
        """Bytes, or a mapping from device to these; None: unlimited. Setting it evicts."""
        return self.cache.budget

    @budget.setter
    def budget(self, budget: Any) -> None:
        self.cache.budget = budget

    def stats(self) -> Any:
        """What the cache did and holds."""
        return self.cache.stats()

    def report(self) -> Any:
        """The functions and lines whose results are in memory."""
        return self.cache.memory()

    def get(self, tree: Any) -> Any:
        """The tree with plain arrays instead of values of a block; what was evicted is recomputed."""
        return jax.tree.map(lambda leaf: leaf.to_concrete_value() if isinstance(leaf, Live) else leaf, tree)

    def __repr__(self) -> str:
        return f"<budget {self.cache!r}>"

    def __str__(self) -> str:
        return str(self.cache)


class Live(jax.core.Tracer):  # type: ignore[type-arg]  # at run time it takes none
    """A value of a block."""

    __slots__ = ("handle",)

    def __init__(self, trace: _Trace, handle: rc.Recomputable[Any], aval: Any) -> None:
        super().__init__(trace, aval)
        self.handle = handle

    def to_concrete_value(self) -> Any:
        """The array; JAX asks for it where it needs a value."""
        return self.handle.get()

    def full_lower(self) -> Any:
        """Itself, or the array: after the block, in another thread, and in a function that an operation calls."""
        is_within = self._trace.around and find_top_trace(()) is not EVAL  # type: ignore[no-untyped-call]  # JAX's
        return self if is_within else self.handle.get()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.handle.get(), *args, **kwargs)

    def __float__(self) -> float:
        return float(self.handle.get())

    def __complex__(self) -> complex:
        return complex(self.handle.get())

    def __format__(self, spec: str) -> str:
        return format(self.handle.get(), spec)

    def __reduce__(self) -> Any:
        return self.handle.get().__reduce__()

    def block_until_ready(self) -> Live:
        """Itself, when it is computed."""
        self.handle.get().block_until_ready()
        return self

    def item(self, *args: int) -> Any:
        """One element, as of the array."""
        return self.handle.get().item(*args)

    def tolist(self) -> Any:
        """All elements, as of the array."""
        return self.handle.get().tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        """All bytes, as of the array."""
        return np.asarray(self).tobytes(order)

    def _unstack(self) -> Any:
        """What JAX takes of each part of a plain array over which it iterates."""
        return list(self)

    def _error_repr(self) -> str:
        """What JAX calls it where it refuses what is no array in memory."""
        return f"a value of a recompute_jax.budget block (of which block.get(x) gives the array), {self.aval}"

    def __repr__(self) -> str:
        return repr(self.handle.get())

    __str__ = __repr__


def _placed(values: Sequence[Live], *places: Sequence[Any]) -> list[Any]:
    """What JAX puts on devices for values, where nothing is traced: that of their arrays."""
    placed: list[Any] = []
    for value, *where in zip(values, *places, strict=True):
        array = value.handle.get()
        placed += shard_arg_handlers[type(array)]([array], *[[one] for one in where])
    return placed


shard_arg_handlers[Live] = _placed


class _Trace(jax.core.Trace):
    """Runs what JAX is asked for inside a block."""

    __slots__ = ("_most", "_sources", "around", "cache")

    def __init__(self, cache: rc.Cache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # JAX's
        self.cache = cache
        self.around: list[Any] = []
        """The traces that were current before, one for each entry of the block."""
        self._sources: dict[int, Value] = {}
        """By id of an array: its source, which is empty once nothing needs it."""
        self._most = _FEW

    def stage_value(self, val: Any) -> Any:
        with set_current_trace(EVAL):  # type: ignore[no-untyped-call]  # JAX's
            return val if isinstance(val, Live) else EVAL.stage_value(val)

    def process_primitive(self, primitive: Primitive, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        avals = tuple(map(jax.typeof, tracers))
        items = tuple(sorted(params.items(), key=lambda item: item[0]))
        around = _config.jax_enable_x64, jax.sharding.get_abstract_mesh()
        try:
            closed = _staged(primitive, avals, items, around)
        except TypeError:  # a parameter that cannot be hashed
            closed = _staged.__wrapped__(primitive, avals, items, around)
        results = self._run(closed, tracers)
        return results if primitive.multiple_results else results[0]

    def _run(self, closed: ClosedJaxpr, tracers: Sequence[Any]) -> list[Live]:
        leaves = list(map(self._leaf, tracers))
        with set_current_trace(EVAL):  # type: ignore[no-untyped-call]  # JAX's
            made = Run(place_of_caller(), self.cache).everything(prepared(closed), leaves, recomputable=True)
        return [Live(self, handle, aval) for handle, aval in zip(made, closed.out_avals, strict=True)]

    def _leaf(self, value: Any) -> Any:
        """What `Run` takes: handles, one for an array however often it is used, and what becomes an array there."""
        if isinstance(value, Live):
            if value.handle.cache is self.cache:
                return value.handle
            value = value.handle.get()  # of another block
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        node = self._sources.get(id(value))
        if node is not None and node.payload is value:
            known = self.cache.extend.refer(node, rc.Recomputable)
            if known is not None:
                return known
        if len(self._sources) >= self._most:
            self._sources = {key: node for key, node in self._sources.items() if node.payload is not EVICTED}
            self._most = max(_FEW, 2 * len(self._sources))
        handle = self.cache.extend.source(value, rc.Recomputable)
        self._sources[id(value)] = node_of(handle)
        return handle

    def process_shard_map(self, primitive: Primitive, fun: Any, tracers: Sequence[Any], /, **params: Any) -> Any:
        """One operation, of the arguments and of what the function closes over."""
        trees: list[Any] = []

        def run(*values: Any) -> Any:
            trees.append(primitive.bind(*values, subfuns=(fun,), **params))  # type: ignore[no-untyped-call]  # JAX's
            return list(trees[0])

        closed = jax.make_jaxpr(run)(*map(jax.typeof, tracers))
        return trees[0].update(self._run(lifted(closed), [*closed.consts, *tracers]))

    def process_call(self, call_primitive: Any, f: Any, tracers: Sequence[Any], params: Any, /) -> Any:
        return self._inlined(f, tracers)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Sequence[Any], /, **_: Any) -> Any:
        return self._inlined(fun, tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, **_: Any
    ) -> Any:
        return self._inlined(fun, tracers)

    def _inlined(self, function: Any, tracers: Sequence[Any]) -> Any:
        with set_current_trace(self):  # type: ignore[no-untyped-call]  # JAX's
            return function.call_wrapped(*tracers)


@lru_cache(4096)
def _staged(primitive: Any, avals: Sequence[Any], items: Sequence[tuple[str, Any]], around: Any) -> ClosedJaxpr:
    """One primitive as a function to prepare."""

    def run(*values: Any) -> Any:
        made = primitive.bind(*values, **dict(items))
        for result in made if primitive.multiple_results else [made]:
            refuse_ref(jax.typeof(result), primitive)
        return made

    closed = jax.make_jaxpr(run)(*avals)
    nowhere = source_info_util.new_source_info()  # it will run for many lines
    equations = [equation.replace(source_info=nowhere) for equation in closed.eqns]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)
