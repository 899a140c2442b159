"""One equation as a function of arrays that can run again, and a traced function as a list of these.

JAX returns from an operation before it is computed, and compiles it when it first meets the shapes. Timing each run
would measure neither right, so kinds of equations are timed once: when one first runs, it runs again, this time with
the host waiting for it. Whatever is of the same kind costs the same afterwards, and the host does not wait.

A function is prepared once for each signature, with the places of its variables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from itertools import count
from time import perf_counter
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    find_top_trace,
    jaxprs_in_params,
    set_current_trace,
)

from recompute.extend import clock_of, running
from recompute.planners import last_uses
from recompute_jax._arrays import OUT_OF_MEMORY, make_room
from recompute_jax._program.jaxpr import bind, effects, flatten, scan_operands, variables
from recompute_jax._program.segments import nbytes

_config: Any = jax.config  # which has no types

with jax.core.eval_context():
    EVAL: Final = find_top_trace(())  # type: ignore[no-untyped-call]  # JAX's
"""Where operations run directly."""


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

    def __init__(self, equation: JaxprEqn, measure: bool, once: bool) -> None:
        where = source_info_util.summarize(equation.source_info)
        self.__name__ = f"{equation.primitive.name} ({where})" if where else equation.primitive.name
        self.once = once  # it has effects
        self._bind = _function_of(equation)
        self._measure = measure
        self._template = [_array(atom) if isinstance(atom, Literal) else None for atom in equation.invars]
        self._holes = [place for place, atom in enumerate(equation.invars) if isinstance(atom, Var)]
        self._surroundings = Surroundings()
        self.nbytes = tuple([nbytes(var.aval) for var in equation.outvars])
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
        # Its cost is the known one, not that of launching it.
        frame.elsewhere = elsewhere + (clock() - start) - seconds
        return results

    def size_key(self) -> int:
        """By which the cache knows what it has learnt of the sizes of results."""
        return self.number

    def run(self, payloads: tuple[Any, ...], *, wait: bool = False) -> Any:
        """The results, without a look at the time. When the device is out of memory, the cache gives back its own."""
        values: Any = payloads
        if len(values) < len(self._template):
            values = self._template.copy()
            for place, value in zip(self._holes, payloads, strict=True):
                values[place] = value
        while True:
            try:
                results = self._surroundings.run(self._bind, values)
                if wait:
                    ready(results)
            except OUT_OF_MEMORY as error:
                if self.once or not make_room(error, payloads, sum(self.nbytes)):
                    raise
            else:
                return results[0] if len(self.nbytes) == 1 and type(results) is list else results

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
    avals = tuple([atom.aval for atom in equation.invars])
    key = equation.primitive, tuple(sorted(equation.params.items(), key=lambda item: item[0])), avals
    try:
        known = _costs.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return Cost()
    if known is None:
        known = _costs[key] = Cost()
    return known


class Step(NamedTuple):
    """One equation to run. Numbers are places in the list of live values."""

    kernel: Kernel
    operands: tuple[int, ...]
    results: tuple[int, ...]  # -1: not needed
    dying: tuple[int, ...]
    scan: Scan | None


class Scan(NamedTuple):
    """A scan that runs step by step."""

    body: Program
    operands: tuple[int | Literal, ...]
    consts: int
    carries: int
    length: int
    reverse: bool
    rows: tuple[int, ...]  # bytes of one row, for each array that is stepped over
    stacks: tuple[int, ...]  # bytes of what all steps leave, for each such result


class Program:
    """A flattened jaxpr, ready to run."""

    __slots__ = ("consts", "inputs", "moves", "outputs", "places", "steps")

    def __init__(self, closed: ClosedJaxpr, unroll_scans: bool, measure: bool, source: Any = None) -> None:
        flat = flatten(closed, inline_custom=True, source=source)
        place: dict[Var, int] = {}
        for var in (*flat.constvars, *flat.invars):
            place[var] = len(place)
        wanted = variables(flat.outvars)
        dying = last_uses([(equation.outvars, variables(equation.invars)) for equation in flat.equations], wanted)
        used = {*wanted, *variables(atom for equation in flat.equations for atom in equation.invars)}
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
        self.outputs = [atom if isinstance(atom, Literal) else place[atom] for atom in flat.outvars]
        self.places = len(place)
        self.moves = any(map(_moves, flat.equations))  # arrays to other devices, or spreads them


def prepared(closed: ClosedJaxpr, *, unroll_scans: bool = False, measure: bool = False) -> Program:
    """The program of a traced function; the same one when asked again in the same configuration of JAX."""
    way = unroll_scans, measure, _config.jax_default_device, _config.jax_enable_x64
    ways = _programs.setdefault(closed, {})
    program = ways.get(way)
    if program is None:
        program = ways[way] = Program(closed, unroll_scans, measure)
    return program


_programs: Final[WeakKeyDictionary[ClosedJaxpr, dict[Any, Program]]] = WeakKeyDictionary()
"""By what JAX traced, which it keeps for as long as the function lives."""


def _step(equation: JaxprEqn, dead: list[Var], place: dict[Var, int], unroll_scans: bool, measure: bool) -> Step:
    params = equation.params
    scan = None
    if unroll_scans and equation.primitive.name == "scan" and params["length"] > 1:
        body = params["jaxpr"]
        constants, carries = scan_operands(equation)
        scan = Scan(
            Program(body, unroll_scans, measure, equation.source_info),
            tuple([atom if isinstance(atom, Literal) else place[atom] for atom in equation.invars]),
            constants,
            carries,
            params["length"],
            params["reverse"],
            tuple([nbytes(aval) for aval in body.in_avals[constants + carries :]]),
            tuple([nbytes(var.aval) for var in equation.outvars[carries:]]),
        )
    return Step(
        Kernel(equation, measure, bool(effects(equation))),
        tuple([place[var] for var in variables(equation.invars)]),  # what its kernel is called with
        tuple([place.get(var, -1) for var in equation.outvars]),
        tuple([place[var] for var in dead if var in place]),
        scan,
    )


def _moves(equation: JaxprEqn) -> bool:
    """Whether the results may lie elsewhere than the operands."""
    if equation.primitive.name == "device_put":
        return any(device is not None for device in equation.params["devices"])
    return equation.primitive.name in ("sharding_constraint", "shard_map", "jit", "reshard", "mesh_cast")
