"""What a step really takes: storages or allocations are watched, once before training or in its first step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import ref

import torch
from torch import fx
from torch._higher_order_ops.effects import has_effects
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recompute import extend
from recompute_torch._compile.costs import allocations, room_of
from recompute_torch._compile.made_up import elsewhere, made_up
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


Run = Callable[[list[Any]], Any]

_PLAIN: Final = (operator.getitem, run_and_save_rng_state, run_with_rng_state)
_FAR: Final = ("_c10d_functional", "c10d")  # other processes take part


class Part:
    """What is to be known of a graph to run it: it is read before passes change it."""

    def __init__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.names = [node.name for node in inputs]
        self.values = [node.meta.get("val") for node in inputs]
        self.returned = [getattr(each, "name", "") for each in tree_leaves(graph.output_node().args)]
        self.harmless = all(map(_harmless, graph.nodes))


class Rehearsal:
    """Of one compiled graph, whose two parts it is told of."""

    def __init__(self) -> None:
        self._parts: dict[bool, tuple[Part, Run]] = {}

    def knows(self, late: bool, part: Part, run: Run) -> None:
        """How a part runs: the backward if `late`, else the forward."""
        self._parts[late] = part, run

    def peak(self) -> int | None:
        """Bytes at the worst moment of a step, beside inputs and parameters, which are made up in one piece of memory.

        None: it cannot be told, since the backward is compiled later, something happens beside the results, or made-up
        values are not accepted.
        """
        if len(self._parts) < 2 or not all(part.harmless for part, _ in self._parts.values()):
            return None
        meter = Allocations()
        try:
            with elsewhere():
                self._step(meter)
        except Exception as error:  # whatever kernels say of such values
            if extend.is_interrupt(error):
                raise
            return None
        return meter.peak or None

    def _step(self, meter: Allocations) -> None:
        (forward, run), (backward, run_back) = self._parts[False], self._parts[True]
        inputs = made_up(forward.values, together=True)
        made = list(meter.watch(run, list(inputs), []))
        saved = dict(zip(forward.returned, made, strict=True))
        results = len(made) - sum(name in saved for name in backward.names)
        del made[results:]  # the results are the caller's
        wanted = list(zip(backward.names, backward.values, strict=True))
        tangents = iter(meter.watch(made_up, [value for name, value in wanted if name not in saved], []))
        given = [saved[name] if name in saved else next(tangents) for name in backward.names]
        del saved, tangents
        meter.watch(run_back, given, [])


def _harmless(node: fx.Node) -> bool:
    """Whether running it once more does nothing but compute."""
    target = node.target
    if node.op != "call_function" or target in _PLAIN or is_sym_node(node):
        return node.op != "call_module"
    return isinstance(target, torch._ops.OpOverload) and not has_effects(target) and target.namespace not in _FAR
