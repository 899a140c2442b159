"""What comes of planning: the report, and the equations that follow the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._remat.report import RematPlan


@dataclass(frozen=True)
class Planned:
    """The plan, and the function of constants and arguments that follows it; None: the function as it is."""

    report: RematPlan
    emitted: ClosedJaxpr | None
    constants: Sequence[Any]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        assert self.emitted is not None, "the function is left as it is"
        return list(jaxpr_as_fun(self.emitted)(*self.constants, *leaves))
