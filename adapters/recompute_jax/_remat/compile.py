"""What XLA makes of a program: bytes of temporaries, by compiling it for a look.

XLA has the last word on memory: it fuses, orders and places buffers. The compilations for looking have the options that
the function will run with, but for LLVM's optimizations, which come after the buffers are placed. Of a program for
several devices the bytes are those of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config  # there is no public way to have a mesh in force while JAX traces
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding

from recompute_jax._emit.gates import explicit_sharding, varying_axes
from recompute_jax._remat.report import Trial

_Spec: Any = jax.sharding.PartitionSpec  # which has no types
_LOOKING: Final[dict[str, Any]] = {"xla_backend_optimization_level": 0}  # of LLVM, which works when buffers are placed


class Argument(NamedTuple):
    """What is known of an argument beside its type."""

    donated: bool = False
    sharding: Any = None
    """Over several devices; None: on one, or as its type says."""


class Compilations:
    """The compilations of one search."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self._looking = _LOOKING if jax.default_backend() == "cpu" else {}

    def compile(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Argument],
        what: str,
        compiler_options: Mapping[str, Any],
        given: int | None = None,
        predicted: int | None = None,
        overhead: float = 1.0,
        constants: Sequence[Any] = (),
    ) -> Trial:
        """Compile a program and note its memory. `constants`, its first arguments, are part of it."""
        started = perf_counter()
        options = {**compiler_options, **self._looking}
        context = jax.sharding.get_abstract_mesh()
        is_manual = AxisType.Manual in context.axis_types
        if is_manual or any(isinstance(each, jax.core.Tracer) for each in constants):
            constants, arguments = (), [*[Argument()] * len(constants), *arguments]
        if is_manual:
            with ThreadPoolExecutor(1) as elsewhere:  # where no mesh is in force, so that one can be
                compiled = elsewhere.submit(_compile_manual, closed, context, options).result()
        else:
            run = partial(jaxpr_as_fun(closed), *constants)
            numbers = tuple([at for at, each in enumerate(arguments) if each.donated])
            function = jax.jit(run, donate_argnums=numbers, compiler_options=options)
            types = [_placed(*each) for each in zip(closed.in_avals[len(constants) :], arguments, strict=True)]
            with _in_force(mesh_of(closed, arguments)):
                compiled = function.lower(*types).compile()
        memory: Any = compiled.memory_analysis()
        size = int(memory.temp_size_in_bytes)
        counted = float((compiled.cost_analysis() or {}).get("flops", 0.0))
        trial = Trial(what, given, predicted, size, overhead, perf_counter() - started, counted)
        self.trials.append(trial)
        return trial


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
    for each in arguments:
        if isinstance(each.sharding, NamedSharding) and isinstance(each.sharding.mesh, Mesh):
            return each.sharding.mesh
    for aval in closed.in_avals:
        abstract = getattr(getattr(aval, "sharding", None), "mesh", None)
        if abstract is not None and not abstract.empty:
            return _mesh(abstract)
    return None


@contextmanager
def _in_force(mesh: Mesh | None) -> Iterator[None]:
    """As `jax.set_mesh`, which may not be called while JAX traces."""
    if mesh is None:
        yield
        return
    before = config.abstract_mesh_context_manager.swap_local(mesh.abstract_mesh), config.device_context.swap_local(mesh)
    try:
        yield
    finally:
        config.abstract_mesh_context_manager.set_local(before[0])
        config.device_context.set_local(before[1])


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
        return [jnp.expand_dims(each, 0) for each in jaxpr_as_fun(closed)(*given)]

    specs = [_Spec(varying_axes(aval) or None) for aval in closed.out_avals]
    mesh = _mesh(abstract, (AxisType.Auto,) * len(abstract.axis_names))
    spread = jax.shard_map(run, mesh=mesh, in_specs=_Spec(), out_specs=specs, check_vma=checked)
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in closed.in_avals]  # type: ignore[no-untyped-call]  # JAX's
    return jax.jit(spread, compiler_options=dict(options)).lower(*types).compile()
