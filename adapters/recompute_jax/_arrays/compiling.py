"""Time that JAX spends on tracing and compiling inside an operation is not what the operation costs."""

from __future__ import annotations

from typing import Any, Final

import jax

from recompute.extend import spend_elsewhere

_EVENTS: Final = frozenset(
    {
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    }
)


def _discount(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:
        spend_elsewhere(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_discount)
