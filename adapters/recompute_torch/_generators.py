"""Generators of random numbers, for operations of `rc.ap`: `torch.Generator`, and the one behind `torch.randn`."""

from __future__ import annotations

from ctypes import string_at
from typing import Any, Final

import torch

from recompute.extend import Generators
from recompute_torch._memory import quietly

_MODULES: Final = ("torch", "torch._C", "torch._C._nn", "torch.nn.functional", "torch.random")


class TorchGenerators(Generators):
    """Those of the processor and of devices. What draws on a device without naming its generator is not found."""

    def serves(self, cls: type) -> bool:
        return issubclass(cls, torch.Generator)

    def of_module(self, name: str) -> Any | None:
        """That of `torch.randn` on the processor."""
        return torch.default_generator if name in _MODULES else None

    def save(self, generator: Any) -> bytes:
        """5 kB on the processor."""

        def read() -> bytes:
            state = generator.get_state()
            return string_at(state.data_ptr(), state.nbytes)

        return quietly(read)

    def restore(self, generator: Any, state: bytes) -> None:
        quietly(lambda: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)))

    def copy(self, generator: Any, state: bytes) -> Any:
        made = torch.Generator(device=generator.device)
        self.restore(made, state)
        return made


generators: Final = TorchGenerators()
