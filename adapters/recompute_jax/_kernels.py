"""One equation as a function of arrays that can run again, and what it costs without compiling or waiting.

JAX returns from an operation before it is computed, and compiles it when it first meets the shapes. Timing each run
would measure neither right, so kinds of equations are timed once: when one first runs, it runs again, this time with
the host waiting for it. Whatever is of the same kind costs the same from then on, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from math import prod
from time import perf_counter
from typing import Any, Final
from weakref import WeakValueDictionary

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Primitive, Var, find_top_trace, set_current_trace

from recompute._flight import running
from recompute_jax._adapter import adapter
from recompute_jax._jaxpr import bind_params

_LONG: Final = 0.5  # seconds; what took longer, compilation included, is not run again to be timed
_SHORT: Final = 0.002  # seconds; what took less is timed twice

with jax.core.eval_context():
    _EVAL: Final = find_top_trace(())  # type: ignore[no-untyped-call]


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
    """An equation, to be called with the arrays in the place of its variables; literals are filled in.

    Runs now also while JAX traces a function, which a `get` in there may cause.
    """

    __slots__ = (
        "__name__",
        "_cost",
        "_ctx",
        "_equation",
        "_fixed",
        "_measure",
        "_primitive",
        "_template",
        "nbytes",
        "number",
    )

    def __init__(self, equation: JaxprEqn, measure: bool) -> None:
        where = source_info_util.summarize(equation.source_info)
        self.__name__ = f"{equation.primitive.name} ({where})"
        self._primitive: Any = equation.primitive
        self._ctx = equation.ctx
        self._measure = measure
        self._template = [each.val if isinstance(each, Literal) else _HOLE for each in equation.invars]
        # What binds functions to be called is made for each run: they are used up.
        own = type(equation.primitive).get_bind_params is not Primitive.get_bind_params
        self._fixed: Any = None if own else equation.params
        self._equation = equation if own else None
        self.nbytes = [_nbytes(each.aval) for each in equation.outvars]
        self._cost = _cost_of(equation)
        self.number = next(_numbers)

    def __call__(self, *payloads: Any) -> Any:
        """The results: one, or a list of several."""
        frame = running.get()
        if frame is None:
            return self.run(payloads)
        clock = frame.cache._clock
        start, nested = clock(), frame.nested
        known = self._cost.seconds
        if known is None:
            results, known = self._timed(payloads)
        elif self._measure:
            _ready(payloads)
            begin = clock()
            results = _ready(self.run(payloads))
            known = clock() - begin
        else:
            results = self.run(payloads)
        frame.nested = nested + (clock() - start) - known  # it costs what is known, not what it took to launch it
        return results

    def size_key(self) -> int:
        """By which the cache knows what it has learnt of the sizes of results."""
        return self.number

    def run(self, payloads: tuple[Any, ...]) -> Any:
        """The results, without a look at the time. When the device is out of memory, the cache gives back its own."""
        values = payloads
        if len(values) < len(self._template):
            given = iter(payloads)
            values = tuple([next(given) if each is _HOLE else each for each in self._template])
        while True:
            try:
                with set_current_trace(_EVAL), self._ctx.manager:  # type: ignore[no-untyped-call]
                    if self._equation is not None:
                        before, params = bind_params(self._equation)
                        results = self._primitive.bind(*before, *values, **params)
                    else:
                        results = self._primitive.bind(*values, **self._fixed)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or not _make_room(payloads, sum(self.nbytes)):
                    raise
            else:
                return results[0] if self._primitive.multiple_results and len(results) == 1 else results

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

    def _wait_for(self, payloads: tuple[Any, ...]) -> tuple[Any, float]:
        _ready(payloads)
        start = perf_counter()
        results = _ready(self.run(payloads))
        return results, perf_counter() - start


def _ready(arrays: Any) -> Any:
    """The arrays, when they are computed."""
    return jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]


class _Hole:
    """Where a variable stands."""


_HOLE: Final = _Hole()


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


def _make_room(payloads: tuple[Any, ...], nbytes: int) -> bool:
    """Whether the cache could free memory on the device."""
    frame = running.get()
    release = getattr(getattr(frame, "cache", None), "release_memory", None)
    if release is None:
        return False
    device = adapter.device(payloads[0]) if payloads else adapter.device(jax.numpy.zeros(()))
    return bool(release(max(1, nbytes), device))


def variables(equation: JaxprEqn) -> list[Var]:
    """The operands that are no literals, in order: what its kernel is called with."""
    return [each for each in equation.invars if isinstance(each, Var)]
