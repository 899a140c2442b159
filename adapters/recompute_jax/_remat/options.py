"""What `remat` was asked for, and what it does by default on each platform."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

import jax

from recompute.text import bytes_or_share
from recompute_jax._emit.gates import GATES, Gate
from recompute_jax._program.segments import Segment
from recompute_jax._remat.measured import measured
from recompute_jax._remat.saved import SavedPlan

_MEMORY: Final[dict[str, Any]] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def parsed(budget: Any) -> tuple[float | None, int | None]:
    """A budget as a share of the plain function's memory, or as bytes. Raises ValueError or TypeError otherwise."""
    number = bytes_or_share(budget)
    return (number, None) if isinstance(number, float) else (None, number)


def checked(gate: Any, costs: Any, effort: Any, compilations: Any, seed: Any) -> None:
    """Raises ValueError or TypeError for options that make no sense."""
    if gate is not None and gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; known are {', '.join(GATES)}")
    if costs not in ("estimated", "measured"):
        raise ValueError(f"costs are 'estimated' or 'measured', not {costs!r}")
    for name, value in (("compilations", compilations), ("seed", seed)):
        if not isinstance(value, Integral):
            raise TypeError(f"{name} is a whole number, not {value!r}")
    if compilations < 1:
        raise ValueError(f"at least one schedule must be compiled, not {compilations}")
    if not isinstance(effort, Real):
        raise TypeError(f"effort is a number, not {effort!r}")
    if not 0 <= float(effort) < math.inf:
        raise ValueError(f"effort is a number, 0 or more, not {effort!r}")


@dataclass(frozen=True)
class Options:
    """How to plan."""

    budget: int | None
    """Bytes; None: `share`."""
    share: float | None
    gate: Gate
    other: Gate | None
    """Tried, too, where compiling is quick."""
    effort: float
    """Of planning: 1 takes at most about as long as compiling the function once."""
    compilations: int
    """At most so many schedules are compiled to look at their memory."""
    seed: int
    price: Callable[[Segment], float] | None
    """The cost of a segment; None: estimated."""
    compiler_options: Mapping[str, Any]
    """What the planned function will be compiled with."""
    platform: str
    offload: bool
    """Values may move to the memory of the host."""


class Requested:
    """The options as they were given; the platform fills in the rest at the first call."""

    def __init__(
        self,
        share: float | None,
        size: int | None,
        gate: Gate | None,
        costs: str,
        effort: float,
        compilations: int,
        seed: int,
        compiler_options: Mapping[str, Any] | None,
        saved: SavedPlan | None = None,
        offload: bool = False,
    ) -> None:
        self.saved = saved
        if saved is not None:
            share, size = saved.share, saved.budget
        self.share = share
        self.size = size
        self.gate = gate
        self.costs = costs
        self.effort = effort
        self.compilations = compilations
        self.seed = seed
        self.given = compiler_options
        self.offload = offload

    def compiler_options(self) -> dict[str, Any]:
        if self.given is not None:
            return dict(self.given)
        whole = self.share is not None and self.share >= 1
        return {} if whole or jax.default_backend() != "cpu" else dict(_MEMORY)

    def options(self, inside: bool) -> Options:
        platform = jax.default_backend()
        return Options(
            budget=self.size,
            share=self.share,
            gate=self.gate or ("branch" if platform == "cpu" else "barrier"),
            other="select" if self.gate is None and platform == "cpu" else None,
            effort=self.effort,
            compilations=self.compilations,
            seed=self.seed,
            price=measured() if self.costs == "measured" else None,
            compiler_options={} if inside else self.compiler_options(),
            platform=platform,
            offload=self.offload and can_offload(),
        )


def can_offload() -> bool:
    """Whether what moves to the host leaves the memory of the device. Raises ValueError if there is nowhere to move."""
    device = jax.devices()[0]
    kinds = [each.kind for each in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise ValueError(
            f"offload=True moves values to pinned_host, which the {device.platform} backend does not have (it has "
            f"{', '.join(kinds) or 'no memories'}): leave offload out"
        )
    if device.platform != "cpu":
        return True
    warnings.warn(
        "offload=True moves nothing here: on the cpu backend pinned_host is the same memory, and XLA leaves transfers "
        "out; values are repeated instead",
        UserWarning,
        stacklevel=2,
    )
    return False
