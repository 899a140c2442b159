"""Operators that draw random numbers: the state of their generators is part of what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Final

import torch

States = tuple[tuple[torch.Generator, torch.Tensor], ...]
"""Generators, and what state each of them was in."""

turn: Final = RLock()
"""One thread at a time draws, or puts a generator back to an earlier state."""


def states(args: Any, kwargs: dict[str, Any]) -> States:
    """The state of each generator that a call may draw from."""
    given = kwargs.get("generator") or next((each for each in args if isinstance(each, torch.Generator)), None)
    if given is not None:
        generators = [given]
    else:
        generators = [torch.default_generator]
        devices = [each.device for each in args if isinstance(each, torch.Tensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            devices.append(torch.device(wanted))
        numbers = {each.index or 0 for each in devices if each.type == "cuda"}
        generators += [torch.cuda.default_generators[number] for number in sorted(numbers)]
    return tuple([(each, each.get_state()) for each in generators])


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
