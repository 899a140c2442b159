"""Candidates as schedules: in regions behind gates, and compiled for a look at the memory that XLA needs for them.

XLA has the last word on memory: it fuses, orders and places buffers. The compilations for looking have the options that
the function will run with, but for LLVM's optimizations, which come after the buffers are placed. Of a program for
several devices the bytes are those of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.sharding_impls import _internal_use_concrete_mesh  # `jax.set_mesh` may not be called while JAX traces
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

from recompute.text import format_bytes
from recompute_jax._program.emit import Gate, Region, updates_apart
from recompute_jax._program.jaxpr import explicit_sharding, lifted, varying_axes
from recompute_jax._program.segments import nbytes, size_of
from recompute_jax._remat.options import Options
from recompute_jax._remat.recipe import Candidate, Recipe
from recompute_jax._remat.report import Trial

_Spec: Any = jax.sharding.PartitionSpec  # which has no types
_LOOKING: Final[dict[str, Any]] = {"xla_backend_optimization_level": 0}  # of LLVM, which works when buffers are placed


class Argument(NamedTuple):
    """What is known of an argument beside its type."""

    donated: bool = False
    sharding: Any = None
    """Over several devices; None: on one, or as its type says."""


@dataclass(frozen=True)
class Asked:
    """A traced function that is to be planned, and how."""

    closed: ClosedJaxpr
    name: str
    options: Options
    arguments: Sequence[Argument]


def look(what: str, closed: ClosedJaxpr, arguments: Sequence[Argument], compiler_options: Mapping[str, Any]) -> Trial:
    """Compile a program for a look at its memory."""
    started = perf_counter()
    options = {**compiler_options, **(_LOOKING if jax.default_backend() == "cpu" else {})}
    context = jax.sharding.get_abstract_mesh()
    is_manual = AxisType.Manual in context.axis_types
    if is_manual or any(isinstance(value, jax.core.Tracer) for value in closed.consts):
        closed, arguments = lifted(closed), [*[Argument()] * len(closed.consts), *arguments]
    if is_manual:
        with ThreadPoolExecutor(1) as elsewhere:  # where no mesh is in force, so that one can be
            compiled = elsewhere.submit(_compile_manual, closed, context, options).result()
    else:
        numbers = tuple([at for at, argument in enumerate(arguments) if argument.donated])
        function = jax.jit(jaxpr_as_fun(closed), donate_argnums=numbers, compiler_options=options)
        types = [_placed(*pair) for pair in zip(closed.in_avals, arguments, strict=True)]
        with _in_force(mesh_of(closed, arguments)):
            compiled = function.lower(*types).compile()
    memory: Any = compiled.memory_analysis()
    counted = float((compiled.cost_analysis() or {}).get("flops", 0.0))
    return Trial(what, int(memory.temp_size_in_bytes), perf_counter() - started, flops=counted)


def _placed(aval: Any, argument: Argument) -> Any:
    """The type, and on which devices."""
    sharding = argument.sharding
    if sharding is None and explicit_sharding(aval) is not None:
        sharding = NamedSharding(_mesh(aval.sharding.mesh), aval.sharding.spec)
    if sharding is None and aval.sharding.mesh.empty:
        return aval
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)  # type: ignore[no-untyped-call]  # JAX's


def mesh_of(closed: ClosedJaxpr, arguments: Sequence[Argument]) -> Mesh | None:
    """The devices that a program is for; None: one."""
    for argument in arguments:
        if isinstance(argument.sharding, NamedSharding) and isinstance(argument.sharding.mesh, Mesh):
            return argument.sharding.mesh
    for var in (*closed.jaxpr.constvars, *closed.jaxpr.invars):
        abstract = getattr(getattr(var.aval, "sharding", None), "mesh", None)
        if abstract is not None and not abstract.empty:
            return _mesh(abstract)
    return None


@contextmanager
def _in_force(mesh: Mesh | None) -> Iterator[None]:
    """As by `jax.set_mesh`."""
    if mesh is None:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _internal_use_concrete_mesh(mesh):
        yield


def _mesh(abstract: Any, types: Any = None) -> Mesh:
    """Some devices in this shape: memory is the same on any."""
    devices = np.array(jax.devices()[: abstract.size]).reshape(abstract.axis_sizes)
    return Mesh(devices, abstract.axis_names, axis_types=types or abstract.axis_types)


def _compile_manual(closed: ClosedJaxpr, abstract: Any, options: Mapping[str, Any]) -> Any:
    """A part of a `shard_map`, compiled as one: arguments that differ over devices are made so of one for all."""
    checked = any(map(varying_axes, (*closed.in_avals, *closed.out_avals)))

    def run(*values: Any) -> list[Any]:
        given = [
            lax.pcast(value, varying_axes(aval), to="varying") if varying_axes(aval) else value
            for value, aval in zip(values, closed.in_avals, strict=True)
        ]
        return [jnp.expand_dims(value, 0) for value in jaxpr_as_fun(closed)(*given)]

    specs = [_Spec(varying_axes(aval) or None) for aval in closed.out_avals]
    mesh = _mesh(abstract, (AxisType.Auto,) * len(abstract.axis_names))
    spread = jax.shard_map(run, mesh=mesh, in_specs=_Spec(), out_specs=specs, check_vma=checked)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]  # type: ignore[no-untyped-call]  # JAX's
    return jax.jit(spread, compiler_options=dict(options)).lower(*types).compile()


_QUICK: Final = 1_500  # equations that compile soon enough to be tried in another way, too


@dataclass(frozen=True)
class Schedule:
    """A candidate that was compiled."""

    trial: Trial
    candidate: Candidate
    regions: list[Region]
    emitted: ClosedJaxpr
    gate: Gate
    length: int
    """Segments in a region, at most."""

    @property
    def is_quick(self) -> bool:
        """Whether compiling it takes little."""
        return size_of(self.emitted.jaxpr) <= _QUICK

    @property
    def recipe(self) -> Recipe:
        """What makes it again."""
        return self.candidate.recipe(self.regions, self.gate)

    @property
    def loops(self) -> tuple[str, ...]:
        """What becomes of loops, and what moves."""
        return self.candidate.looped.texts + self.candidate.fitted.texts + _about_moves(self.candidate)


class Schedules:
    """The schedules of one function that were looked at."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.trials: list[Trial] = []
        """All compilations, in order."""
        pairs = zip(asked.closed.in_avals, asked.arguments, strict=True)
        self.donated = sum(nbytes(aval) for aval, argument in pairs if argument.donated)
        """Bytes of arguments."""
        self.scale = 1.0
        """What one of several devices has of the bytes of all."""

    def compile(self, candidate: Candidate, what: str, length: int, gate: Gate | None = None) -> Schedule:
        """In regions of so many segments, behind the gate that was asked for or another one.

        `what` is said of it, with its `size` in bytes.
        """
        given = int(self.scale * candidate.plan.budget)
        what = what.format(size=format_bytes(given)) + (f", gate {gate}" if gate else "")
        gate = gate or self._asked.options.first_gate
        steps = candidate.regions(int(given / self.scale), length)
        if self.donated and gate == "branch" and len(steps) > 1:
            steps = updates_apart(candidate.segments, steps)
        emitted = candidate.emitted(steps, gate)
        what = f"{what}, {len(steps)} regions" if len(steps) > 1 else what
        compiled = look(what, emitted, self._asked.arguments, self._asked.options.flags)
        predicted = int(self.scale * candidate.peak)
        trial = replace(compiled, budget=given, predicted=predicted, overhead=candidate.overhead)
        self.trials.append(trial)
        return Schedule(trial, candidate, steps, emitted, gate, length)

    def plain(self, what: str, compiler_options: Mapping[str, Any]) -> int:
        """Bytes of temporaries of the function as it is."""
        self.trials.append(look(what, self._asked.closed, self._asked.arguments, compiler_options))
        return self.trials[-1].compiled


def _about_moves(candidate: Candidate) -> tuple[str, ...]:
    if not candidate.moved:
        return ()
    made = [var for number in candidate.moved for var in candidate.segments.segments[number].outputs]
    return (f"{len(made)} values ({format_bytes(sum(nbytes(var.aval) for var in made))}) move to the host and back",)
