"""Random numbers: the state of generators is part of what operators and functions are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from recompute.extend import Generators, RLock
from recompute_torch._memory import bytes_of, quietly, storage_of

States = tuple[tuple[torch.Generator, torch.Tensor], ...]
"""Generators, and what state each of them was in."""

turn: Final = RLock()
"""One thread at a time draws, or puts a generator back to an earlier state."""


def states(args: Any, kwargs: dict[str, Any]) -> States:
    """The state of each generator that a call may draw from."""
    given = kwargs.get("generator") or next((one for one in args if isinstance(one, torch.Generator)), None)
    if given is not None:
        generators = [given]
    else:
        generators = [torch.default_generator]
        devices = [argument.device for argument in args if isinstance(argument, torch.Tensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            devices.append(torch.device(wanted))
        numbers = {device.index or 0 for device in devices if device.type == "cuda"}
        generators += [torch.cuda.default_generators[number] for number in sorted(numbers)]
    return tuple([(generator, generator.get_state()) for generator in generators])


@contextmanager
def replaying(earlier: States) -> Iterator[None]:
    """The generators are in an earlier state inside the block, and afterwards in the one they were in."""
    with turn:
        now = [(generator, generator.get_state()) for generator, _ in earlier]
        try:
            for generator, state in earlier:
                generator.set_state(state)
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


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
        return quietly(lambda: bytes(bytes_of(storage_of(generator.get_state()))))

    def restore(self, generator: Any, state: bytes) -> None:
        quietly(lambda: generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)))

    def copy(self, generator: Any, state: bytes) -> Any:
        made = torch.Generator(device=generator.device)
        self.restore(made, state)
        return made


generators: Final = TorchGenerators()
