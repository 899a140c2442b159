"""What `remat` was asked for, and what it does by default on each platform."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Final

import jax

from recompute.extend import bytes_or_share
from recompute_jax._gates import GATES, Gate
from recompute_jax._measure import measured
from recompute_jax._options import Options

_MEMORY: Final[dict[str, Any]] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def parsed(budget: Any) -> tuple[float | None, int | None]:
    """A budget as a share of the plain function's memory, or as bytes. Raises ValueError or TypeError otherwise."""
    number = bytes_or_share(budget)
    return (number, None) if isinstance(number, float) else (None, number)


def checked(gate: Any, costs: Any, time_limit: Any, compilations: Any, seed: Any) -> None:
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
    if not isinstance(time_limit, Real):
        raise TypeError(f"time_limit is a number of seconds, not {time_limit!r}")
    if not 0 <= float(time_limit) < math.inf:
        raise ValueError(f"time_limit is a number of seconds, 0 or more, not {time_limit!r}")


class Asked:
    """The options as they were given; the platform fills in the rest at the first call."""

    def __init__(
        self,
        share: float | None,
        size: int | None,
        gate: Gate | None,
        costs: str,
        time_limit: float,
        compilations: int,
        seed: int,
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self.share = share
        self.size = size
        self.gate = gate
        self.costs = costs
        self.time_limit = time_limit
        self.compilations = compilations
        self.seed = seed
        self.given = compiler_options

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
            time_limit=self.time_limit,
            compilations=self.compilations,
            seed=self.seed,
            price=measured() if self.costs == "measured" else None,
            compiler_options={} if inside else self.compiler_options(),
            platform=platform,
        )
