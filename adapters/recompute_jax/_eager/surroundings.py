"""What an operation's results depend on beside its operands: JAX's default device, its 64-bit mode, what is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
from jax.extend.core import find_top_trace, set_current_trace

_config: Any = jax.config  # which has no types

with jax.core.eval_context():
    EVAL: Final = find_top_trace(())  # type: ignore[no-untyped-call]  # JAX's
"""Where operations run at once."""


class Surroundings:
    """Those of the place where it is made, for an operation that may run again anywhere."""

    __slots__ = ("_device", "_x64")

    def __init__(self) -> None:
        self._device = _config.jax_default_device
        self._x64 = _config.jax_enable_x64

    def run(self, function: Callable[..., Any], operands: Iterable[Any]) -> Any:
        """`function(*operands)` as if it stood there; not traced, even if JAX traces what calls this."""
        with set_current_trace(EVAL):  # type: ignore[no-untyped-call]  # JAX's
            if _config.jax_default_device is self._device and _config.jax_enable_x64 is self._x64:
                return function(*operands)
            with jax.default_device(self._device), jax.enable_x64(self._x64):
                return function(*operands)
