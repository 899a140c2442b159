"""A traced function prepared to run equation by equation: once for each signature, with the places of its variables."""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from recompute.planners import last_uses
from recompute_jax._eager.kernels import Kernel, variables
from recompute_jax._program.costs import nbytes
from recompute_jax._program.jaxpr import effects, flatten


class Step(NamedTuple):
    """One equation to run. Numbers are places in the list of what is alive."""

    kernel: Kernel
    operands: tuple[int, ...]
    results: tuple[int, ...]  # -1: nobody needs it
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
        wanted = [each for each in flat.outvars if isinstance(each, Var)]
        dying = last_uses([(each.outvars, variables(each)) for each in flat.equations], wanted)
        used = {each for equation in flat.equations for each in variables(equation)}
        used.update(wanted)
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
        self.moves = any(map(_moves, flat.equations))  # arrays to other devices, or spreads them


def prepared(closed: ClosedJaxpr, unroll_scans: bool, measure: bool) -> Program:
    """The program of what was traced; the same one when asked again in the same configuration of JAX."""
    config: Any = jax.config  # which has no types
    way = unroll_scans, measure, config.jax_default_device, config.jax_enable_x64
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
        body, carries = params["jaxpr"], params["num_carry"]
        scan = Scan(
            Program(body, unroll_scans, measure, equation.source_info),
            tuple([each if isinstance(each, Literal) else place[each] for each in equation.invars]),
            params["num_consts"],
            carries,
            params["length"],
            params["reverse"],
            tuple([nbytes(each) for each in body.in_avals[params["num_consts"] + carries :]]),
            tuple([nbytes(each.aval) for each in equation.outvars[carries:]]),
        )
    return Step(
        Kernel(equation, measure, bool(effects(equation))),
        tuple([place[each] for each in variables(equation)]),
        tuple([place.get(each, -1) for each in equation.outvars]),
        tuple([place[each] for each in dead if each in place]),
        scan,
    )


def _moves(equation: JaxprEqn) -> bool:
    """Whether the results may lie elsewhere than the operands."""
    if equation.primitive.name == "device_put":
        return any(device is not None for device in equation.params["devices"])
    return equation.primitive.name in ("sharding_constraint", "shard_map", "jit", "reshard", "mesh_cast")
