"""How to plan: the options as they were given, the defaults of each platform, and measured costs of segments."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from timeit import repeat
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp

from recompute_jax._program.emit import GATES, Gate
from recompute_jax._program.jaxpr import Flat, run_equation, zeros
from recompute_jax._program.segments import Segment
from recompute_jax._remat.recipe import fingerprint
from recompute_jax._remat.report import SavedPlan

Costs = Literal["estimated", "measured"]

_MEMORY: Final[dict[str, Any]] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_TIMES: Final = 4  # runs of a segment, of which the shortest counts


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to plan. Raises ValueError or TypeError for options that make no sense."""

    budget: int | None
    """Bytes; None: `of_peak`."""
    of_peak: float | None
    """The budget as a share of the temporaries of the function under jit."""
    saved: SavedPlan | None = None
    """What is followed instead of a search."""
    gate: Gate | None = None
    costs: Costs = "estimated"
    effort: float = 1.0
    """Of planning: 1 takes at most about as long as compiling the function once."""
    compilations: int = 8
    """At most so many schedules are compiled to look at their memory."""
    seed: int = 0
    tiers: Literal["host"] | None = None
    """Where values may move."""
    compiler_options: Mapping[str, Any] | None = None
    """What the planned function will be compiled with; None: `flags` says."""

    def __post_init__(self) -> None:
        if self.gate is not None and self.gate not in GATES:
            raise ValueError(f"unknown gate {self.gate!r}; known are {', '.join(GATES)}")
        if self.costs not in ("estimated", "measured"):
            raise ValueError(f"costs are 'estimated' or 'measured', not {self.costs!r}")
        if self.tiers not in (None, "host"):
            raise ValueError(f"tiers is 'host' or None, not {self.tiers!r}")
        for name in ("compilations", "seed"):
            if not isinstance(getattr(self, name), Integral):
                raise TypeError(f"{name} is a whole number, not {getattr(self, name)!r}")
        if self.compilations < 1:
            raise ValueError(f"at least one schedule must be compiled, not {self.compilations}")
        if not isinstance(self.effort, Real):
            raise TypeError(f"effort is a number, not {self.effort!r}")
        if not 0 <= float(self.effort) < math.inf:
            raise ValueError(f"effort is a number, 0 or more, not {self.effort!r}")

    @property
    def first_gate(self) -> Gate:
        """The gate that was asked for, or else what holds on this platform."""
        return self.gate or ("branch" if jax.default_backend() == "cpu" else "barrier")

    @property
    def other_gate(self) -> Gate | None:
        """Tried, too, where compiling is quick."""
        return "select" if self.gate is None and jax.default_backend() == "cpu" else None

    @property
    def flags(self) -> dict[str, Any]:
        """The compiler options."""
        if self.compiler_options is not None:
            return dict(self.compiler_options)
        whole = self.of_peak is not None and self.of_peak >= 1
        return {} if whole or jax.default_backend() != "cpu" else dict(_MEMORY)


def host_memory() -> bool:
    """Whether what moves to the host leaves the memory of the device. Raises ValueError if there is nowhere to move."""
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise ValueError(
            f"tiers='host' moves values to pinned_host, which the {device.platform} backend does not have (it has "
            f"{', '.join(kinds) or 'no memories'}): leave tiers out"
        )
    if device.platform != "cpu":
        return True
    warnings.warn(
        "tiers='host' moves nothing here: on the cpu backend pinned_host is the same memory, and XLA leaves transfers "
        "out; values are repeated instead",
        UserWarning,
        stacklevel=2,
    )
    return False


def measured() -> Callable[[Segment], float]:
    """The price of a segment in seconds, the least of a few runs with zeros; segments that are alike are run once."""
    known: dict[str, float] = {}

    def price(part: Segment) -> float:
        kind = fingerprint(Flat([], [], list(part.inputs), list(part.outputs), part.equations))
        if kind not in known:
            known[kind] = _seconds(part)
        return known[kind]

    return price


def _seconds(part: Segment) -> float:
    def run(*values: Any) -> list[Any]:
        env = dict(zip(part.inputs, values, strict=True))
        for eqn in part.equations:
            run_equation(eqn, env)
        return [env[var] for var in part.outputs]

    if part.once:
        return 0.0
    with jax.ensure_compile_time_eval():
        inputs = [jnp.asarray(zeros(var.aval)) for var in part.inputs]
        compiled = jax.jit(run).lower(*inputs).compile()
        return min(repeat(lambda: jax.block_until_ready(compiled(*inputs)), number=1, repeat=_TIMES))  # type: ignore[no-untyped-call]  # JAX's
