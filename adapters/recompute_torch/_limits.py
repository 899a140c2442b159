"""What a budget of a block means in bytes on each device, and one for activations beside what a training keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

import torch

import recompute as rc
from recompute.text import bytes_or_share, parse_budget
from recompute_torch._adapter import adapter
from recompute_torch._memory import device_name


def for_cache(budget: Any) -> Any:
    """A budget as the cache takes it: shares of a GPU's memory become bytes."""
    if isinstance(budget, Mapping):
        sizes = {}
        for name, size in budget.items():
            device = _device(name)
            if device in sizes:
                raise ValueError(f"the budget names {device} twice, once as {name!r}: give it once")
            sizes[device] = _size(device, size)
        return sizes
    if budget == "auto":
        return None
    if budget is None or callable(budget) or isinstance(bytes_or_share(budget), int):
        return budget
    return {device: _size(device, budget) for device in adapter.devices()}


def _device(name: Any) -> str:
    """The pool of a device that a budget names. Raises ValueError if torch knows no such device."""
    try:
        return device_name(torch.device(name))
    except (RuntimeError, TypeError):
        raise ValueError(f"{name!r} in the budget is no device of torch: give such as 'cpu' or 'cuda:0'") from None


def _size(device: str, budget: Any) -> Any:
    if device == "cpu" or budget is None or callable(budget):  # the cache knows the memory of the machine itself
        return budget
    return parse_budget(budget, whole=lambda: int(torch.cuda.mem_get_info(torch.device(device))[1]))


_FEW: Final = 0.01
"""Of all activations: what a device has beside others that it does not matter how many more it gets."""


class Activations:
    """The budget of each device: what stays in memory there, and room for activations.

    In the first step that is what stays so far. Afterwards it is what stayed at its end, gradients and what the
    optimizer remembers included; so the budget is a number. For a share, the first step is measured without a limit; a
    device that has next to none of the activations, as the CPU beside a GPU, is not limited afterwards either.
    """

    def __init__(self, cache: rc.Cache, activations: Any) -> None:
        self._cache: Final = cache
        self._room = bytes_or_share(activations, "activations")
        self._most = dict.fromkeys(adapter.devices(), 0)  # activations of the first step, evicted ones too
        self._limits: dict[str, int] = {}
        cache.budget = {device: self._asked(device) for device in self._most}

    def _asked(self, device: str) -> Callable[[int], int]:
        def limit(used: int) -> int:
            pool = self._cache.extend.pools().get(device)
            stays = 0 if pool is None else pool.sources
            self._most[device] = max(self._most[device], used + self._cache.extend.load().missing - stays)
            return stays + self._room if isinstance(self._room, int) else inf  # type: ignore[return-value]  # no limit

        return limit

    def stepped(self) -> None:
        """A step is over: all that it needs to keep has been there."""
        limits: dict[str, int] = {}
        total = sum(self._most.values())
        for device, most in self._most.items():
            if not isinstance(self._room, int) and most < _FEW * total:
                continue
            pool = self._cache.extend.pools().get(device)
            room = self._room if isinstance(self._room, int) else max(1, int(self._room * most))
            limits[device] = max(self._limits.get(device, 0), room + (0 if pool is None else pool.sources))
        if limits != self._limits:
            self._limits = limits
            self._cache.budget = dict(limits)
