"""What XLA makes of a program: bytes of temporaries, by compiling it for a look.

XLA has the last word on memory: it fuses, orders and places buffers. The compilations for looking are done without
LLVM's optimizations, which change no buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute_jax._jaxpr import struct
from recompute_jax._report import Trial

_LOOKING: Final[dict[str, Any]] = {"xla_backend_optimization_level": 0}


class Looks:
    """The compilations of one search."""

    def __init__(self, platform: str) -> None:
        self.trials: list[Trial] = []
        self._looking = _LOOKING if platform == "cpu" else {}

    def look(
        self,
        closed: ClosedJaxpr,
        donated: Sequence[bool],
        what: str,
        compiler_options: Mapping[str, Any],
        given: int | None = None,
        predicted: int | None = None,
        overhead: float = 1.0,
    ) -> Trial:
        """Compile a program, whose constants are given as arguments, and note its memory."""
        started = perf_counter()
        numbers = tuple([at for at, each in enumerate(donated) if each])
        options = {**compiler_options, **self._looking}
        function = jax.jit(jaxpr_as_fun(closed), donate_argnums=numbers, compiler_options=options)
        compiled = function.lower(*map(struct, closed.in_avals)).compile()
        memory: Any = compiled.memory_analysis()
        size = int(memory.temp_size_in_bytes)
        counted = float((compiled.cost_analysis() or {}).get("flops", 0.0))
        trial = Trial(what, given, predicted, size, overhead, perf_counter() - started, counted)
        self.trials.append(trial)
        return trial
