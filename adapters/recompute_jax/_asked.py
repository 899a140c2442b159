"""What `remat` was asked for, and what it does by default on each platform."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import jax

from recompute._budget import parse_bytes
from recompute_jax._gates import Gate
from recompute_jax._measure import measured
from recompute_jax._options import Options

_MEMORY: Final[dict[str, Any]] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def parsed(budget: Any) -> tuple[float | None, int | None]:
    """A budget as a share, or as bytes. Raises ValueError or TypeError for anything else."""
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"budget {budget!r} is not a share; write text such as '40%'") from None
    elif isinstance(budget, float):
        share = budget
    else:
        return None, parse_bytes(budget)
    if not 0 < share < math.inf:
        raise ValueError(f"a share of the plain function's memory is above 0, such as 0.4, not {budget!r}")
    return share, None


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
