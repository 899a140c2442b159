"""How to plan, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._gates import Gate
from recompute_jax._report import RematPlan
from recompute_jax._segments import Segment


@dataclass(frozen=True)
class Options:
    """How to plan."""

    budget: int | None
    """Bytes; None: `share`."""
    share: float | None
    gate: Gate
    other: Gate | None
    """Tried, too, where compiling is quick."""
    time_limit: float
    """Seconds for planning, without compiling."""
    compilations: int
    """At most so many schedules are compiled to look at their memory."""
    seed: int
    price: Callable[[Segment], float] | None
    """The cost of a segment; None: estimated."""
    compiler_options: Mapping[str, Any]
    """What the planned function will be compiled with."""
    platform: str


@dataclass(frozen=True)
class Planned:
    """The plan, and the function of constants and arguments that follows it; None: the function as it is."""

    report: RematPlan
    emitted: ClosedJaxpr | None
    constants: Sequence[Any]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        assert self.emitted is not None, "the function is left as it is"
        return list(jaxpr_as_fun(self.emitted)(*self.constants, *leaves))
