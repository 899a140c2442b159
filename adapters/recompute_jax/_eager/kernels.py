"""One equation as a function of arrays that can run again, and what it costs without compiling or waiting.

JAX returns from an operation before it is computed, and compiles it when it first meets the shapes. Timing each run
would measure neither right, so kinds of equations are timed once: when one first runs, it runs again, this time with
the host waiting for it. Whatever is of the same kind costs the same from then on, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from itertools import count
from math import prod
from time import perf_counter
from typing import Any, Final
from weakref import WeakValueDictionary

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Primitive, Var, find_top_trace, jaxprs_in_params, set_current_trace

from recompute.extend import clock_of, running
from recompute_jax._arrays.devices import OUT_OF_MEMORY, make_room
from recompute_jax._program.jaxpr import bind

_config: Any = jax.config  # which has no types

with jax.core.eval_context():
    EVAL: Final = find_top_trace(())  # type: ignore[no-untyped-call]  # JAX's
"""Where operations run at once."""


class Surroundings:
    """Those of the place where it is made, for an operation that may run again anywhere."""

    __slots__ = ("_device", "_x64")

    def __init__(self) -> None:
        self._device = _config.jax_default_device
        self._x64 = _config.jax_enable_x64

    def run(self, function: Callable[..., Any], operands: Iterable[Any]) -> Any:
        """`function(*operands)` as if it stood there; not traced, even if JAX traces what calls this."""
        with set_current_trace(EVAL):  # type: ignore[no-untyped-call]  # JAX's
            if _config.jax_default_device is self._device and _config.jax_enable_x64 is self._x64:
                return function(*operands)
            with jax.default_device(self._device), jax.enable_x64(self._x64):
                return function(*operands)


_LONG: Final = 0.5  # seconds; what took longer, compilation included, is not run again to be timed
_SHORT: Final = 0.002  # seconds; what took less is timed twice


class Cost:
    """What a kind of equation costs; None until it is known."""

    __slots__ = ("__weakref__", "first", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.first: float | None = None  # of a long first run, with whatever was compiled


_numbers: Final = count()

_costs: Final[WeakValueDictionary[Hashable, Cost]] = WeakValueDictionary()
"""Primitive, parameters and shapes -> cost, for as long as a prepared function has such an equation."""


class Kernel:
    """An equation, to be called with the arrays instead of its variables; literals are filled in.

    Runs as it first did whenever it runs again: also while JAX traces a function, which a `get` in there may cause.
    """

    __slots__ = (
        "__name__",
        "_bind",
        "_cost",
        "_holes",
        "_measure",
        "_several",
        "_surroundings",
        "_template",
        "nbytes",
        "number",
        "once",
    )

    def __init__(self, equation: JaxprEqn, measure: bool, once: bool) -> None:
        where = source_info_util.summarize(equation.source_info)
        self.__name__ = f"{equation.primitive.name} ({where})" if where else equation.primitive.name
        self.once = once  # it has effects
        self._bind = _function_of(equation)
        self._several = len(equation.outvars) != 1
        self._measure = measure
        self._template = [_array(each) if isinstance(each, Literal) else None for each in equation.invars]
        self._holes = [place for place, each in enumerate(equation.invars) if isinstance(each, Var)]
        self._surroundings = Surroundings()
        self.nbytes = tuple([_nbytes(each.aval) for each in equation.outvars])
        self._cost = _cost_of(equation)
        self.number = next(_numbers)

    def __call__(self, *payloads: Any) -> Any:
        """The results: one, or a list of several."""
        frame = running()
        if frame is None:
            return self.run(payloads)
        clock = clock_of(frame)
        start, elsewhere = clock(), frame.elsewhere
        seconds = self._cost.seconds
        if seconds is None:
            results, seconds = self._timed(payloads)
        elif self._measure:
            results, seconds = self._wait_for(payloads, clock)
        else:
            results = self.run(payloads)
        # It costs what is known, not what it took to launch it.
        frame.elsewhere = elsewhere + (clock() - start) - seconds
        return results

    def size_key(self) -> int:
        """By which the cache knows what it has learnt of the sizes of results."""
        return self.number

    def run(self, payloads: tuple[Any, ...], wait: bool = False) -> Any:
        """The results, without a look at the time. When the device is out of memory, the cache gives back its own."""
        values: Any = payloads
        if len(values) < len(self._template):
            values = self._template.copy()
            for place, each in zip(self._holes, payloads, strict=True):
                values[place] = each
        while True:
            try:
                results = self._surroundings.run(self._bind, values)
                if wait:
                    ready(results)
            except OUT_OF_MEMORY as error:
                if self.once or not make_room(error, payloads, sum(self.nbytes)):
                    raise
            else:
                return results if self._several or type(results) is not list else results[0]

    def _timed(self, payloads: tuple[Any, ...]) -> tuple[Any, float]:
        """Run it more than once, and find out what it costs: the results, seconds."""
        cost = self._cost
        if cost.first is None:
            results, seconds = self._wait_for(payloads)
            cost.first = seconds
            if seconds > _LONG:
                return results, seconds
            del results  # or it would be in memory twice
        results, seconds = self._wait_for(payloads)
        if seconds < _SHORT:
            del results
            results, again = self._wait_for(payloads)
            seconds = min(seconds, again)
        cost.seconds = seconds
        return results, seconds

    def _wait_for(self, payloads: tuple[Any, ...], clock: Callable[[], float] = perf_counter) -> tuple[Any, float]:
        ready(payloads)
        start = clock()
        results = self.run(payloads, wait=True)
        return results, clock() - start


def variables(equation: JaxprEqn) -> list[Var]:
    """The operands that are no literals, in order: what its kernel is called with."""
    return [each for each in equation.invars if isinstance(each, Var)]


def _function_of(equation: JaxprEqn) -> Callable[..., Any]:
    """What computes the equation's results from its operands.

    Most primitives run as in JAX's own interpreter, which is under `jit`, each alone; to call the jitted function
    itself takes half of the time. Equations of one kind share it, as in JAX, unless they have jaxprs in them.
    """
    primitive: Any = equation.primitive

    def bound(*values: Any) -> Any:
        return bind(equation, values)

    bound.__name__ = bound.__qualname__ = primitive.name
    if type(primitive).get_bind_params is not Primitive.get_bind_params:  # it calls a function
        return jax.jit(bound)
    if getattr(getattr(primitive.impl, "func", None), "__name__", None) != "apply_primitive":
        return bound
    if any(jaxprs_in_params(equation.params)):
        return jax.jit(bound)
    try:
        return _shared(primitive, tuple(equation.params.items()), equation.ctx)
    except TypeError:  # a parameter that cannot be hashed
        return jax.jit(bound)


@lru_cache(4096)
def _shared(primitive: Any, params: tuple[tuple[str, Any], ...], context: Any) -> Callable[..., Any]:
    def bound(*values: Any) -> Any:
        with context.manager:
            return primitive.bind(*values, **dict(params))

    bound.__name__ = bound.__qualname__ = primitive.name
    return jax.jit(bound)


def _array(literal: Literal) -> Any:
    """A literal as an array, so that it is not moved to the device again and again."""
    return jax.numpy.asarray(literal.val)


def ready(arrays: Any) -> Any:
    """The arrays, when they are computed."""
    return jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]  # JAX's


def _cost_of(equation: JaxprEqn) -> Cost:
    """The cost of equations of this kind, maybe not known yet."""
    avals = tuple([each.aval for each in equation.invars])
    key = equation.primitive, tuple(sorted(equation.params.items(), key=lambda item: item[0])), avals
    try:
        known = _costs.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return Cost()
    if known is None:
        known = _costs[key] = Cost()
    return known


def _nbytes(aval: Any) -> int:
    return prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0
