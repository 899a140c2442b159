"""The real peak of a graph's forward and backward: every storage that they make, from birth to death."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recompute_torch._compile.costs import allocations, room_of
from recompute_torch._memory import storage_of


class Meter:
    """Bytes that are in memory because of one step through a graph, and the most that ever were."""

    def __init__(self) -> None:
        self.peak = 0
        self._used = 0
        self._live: dict[int, ref[torch.UntypedStorage]] = {}

    def watch(self, run: Callable[[list[Any]], Any], args: list[Any], new: Sequence[int]) -> Any:
        """Run a boxed graph; of its arguments, those with the numbers `new` came to be for it."""
        for number in new:
            self.add(args[number])
        with _Watching(self):
            return run(args)

    def add(self, value: Any) -> None:
        """Count the storages of tensors in a value, until they are gone."""
        for each in tree_leaves(value):
            storage = _storage(each)
            if storage is not None and storage._cdata not in self._live:
                self._hold(storage)
        self.peak = max(self.peak, self._used)

    def knows(self, value: Any) -> bool:
        """Whether the memory of a tensor is counted."""
        storage = _storage(value)
        return storage is not None and storage._cdata in self._live

    def spike(self, nbytes: int) -> None:
        """For a moment so much more was in use."""
        self.peak = max(self.peak, self._used + nbytes)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            self._live.pop(key, None)
            self._used -= size

        self._live[key] = ref(storage, gone)
        self._used += size


class Allocations:
    """The peak of a step by the allocators' account: inductor's kernels are no operators that one could watch.

    While somebody else profiles, nothing is heard, and the peak stays 0.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._used = 0

    def watch(self, run: Callable[[list[Any]], Any], args: list[Any], new: Sequence[int]) -> Any:
        """Run a boxed graph; of its arguments, those with the numbers `new` came to be for it."""
        arrived = sum(args[number].untyped_storage().nbytes() for number in new)
        with allocations(True) as changes:
            result = run(args)
        for change in [arrived, *changes] if changes else []:
            self._used += change
            self.peak = max(self.peak, self._used)
        return result


class _Watching(TorchDispatchMode):
    """Tells the meter what each operator makes."""

    supports_higher_order_operators = True

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage._cdata for each in tree_leaves((args, kwargs)) if (storage := _storage(each)) is not None}
        new = [each for each in tree_leaves(result) if (at := _storage(each)) is not None and at._cdata not in given]
        self._meter.add(new)
        self._meter.spike(room_of(func, args, kwargs))
        return result


def _storage(value: Any) -> torch.UntypedStorage | None:
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return storage_of(value)
    except (NotImplementedError, RuntimeError):  # sparse
        return None
