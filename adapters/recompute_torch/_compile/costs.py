"""What a run of an operator costs, in time and in memory beside its results: measured once, or reckoned."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter
from typing import Any, Final, Literal

import torch
from torch import fx
from torch._C import _autograd as profiler
from torch._C import _profiler
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from recompute_torch._compile.made_up import Shape, as_int, elsewhere, hinted
from recompute_torch._compile.program import Price

Costs = Literal["measured", "estimated"]

CHANNELS_LAST: Final = "recompute: channels last"
"""In the meta of a node: pictures that it is given lie so when it runs, whatever their metadata says."""

_RUNS: Final = 5  # at most
_ENOUGH: Final = 0.02  # seconds of runs of one operator
_FLOPS: Final = {"cpu": 5e4, "cuda": 2e7}  # in a microsecond
_BYTES: Final = {"cpu": 1e4, "cuda": 1e6}  # moved in a microsecond
_CALL: Final = 5.0  # microseconds to start an operator

_known: dict[Hashable, Price] = {}
"""Of this process: (operator, dtypes, shapes, strides, other arguments) -> what it takes."""


class Prices:
    """What gives the price of a node of a graph."""

    def __init__(self, costs: Costs) -> None:
        self._measured = costs == "measured"

    def __call__(self, node: fx.Node) -> Price:
        """With measured costs the operator is run on made-up tensors the first time that it is seen."""
        try:
            args, kwargs = hinted((node.args, node.kwargs), node.meta.get(CHANNELS_LAST, False))
            key = (node.target, repr((args, kwargs)), self._measured)
            if key not in _known:
                _known[key] = self._price(node, args, kwargs)
            return _known[key]
        except (RuntimeError, TypeError, ValueError, IndexError):  # it cannot be run alone: its inputs are special
            return Price(_reckoned(node), flops=_flops(node))

    def _price(self, node: fx.Node, args: Any, kwargs: Any) -> Price:
        if not isinstance(node.target, torch._ops.OpOverload):
            return Price(_reckoned(node), flops=_flops(node))
        with elsewhere():
            seconds, room = _taken(_runner(node.target, args, kwargs))
            return Price(seconds * 1e6 if self._measured else _reckoned(node), room, _flops(node))


def room_of(target: Any, args: Any, kwargs: Any) -> int:
    """Bytes that a run of an operator on these tensors needs beside its results, if that is known."""
    try:
        given = repr(hinted((args, kwargs)))
    except (RuntimeError, NotImplementedError):
        return 0
    return max(
        (_known[key].room for key in ((target, given, True), (target, given, False)) if key in _known), default=0
    )


def _runner(target: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    made: Any = tree_map(lambda each: each.make() if isinstance(each, Shape) else each, (args, kwargs))
    return lambda: target(*made[0], **made[1])


def _taken(run: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of the fastest of a few runs, and bytes at the worst moment of one beyond what it returns."""
    run()  # what the first run alone allocates is kept by libraries
    most, best, spent = 0, float("inf"), 0.0
    for number in range(_RUNS):
        with allocations(not number) as changes:
            start = perf_counter()
            result = run()
            if any(isinstance(each, torch.Tensor) and each.is_cuda for each in tree_leaves(result)):
                torch.cuda.synchronize()
            took = perf_counter() - start
        if changes:
            used = list(accumulate(changes))
            most = max(0, *used) - used[-1]
        del result
        best, spent = min(best, took), spent + took
        if spent > _ENOUGH:
            break
    return best, most


@contextmanager
def allocations(wanted: bool) -> Iterator[list[int]]:
    """The bytes that are allocated inside, as the allocators tell the profiler, less than zero for those that go."""
    changes: list[int] = []
    if not wanted or profiler._profiler_enabled():  # one profiler at a time: the user is looking
        yield changes
        return
    state, options = _profiler.ProfilerState.CPU, _profiler._ExperimentalConfig()
    profiler._enable_profiler_legacy(_profiler.ProfilerConfig(state, False, True, False, False, False, options))
    try:
        yield changes
    finally:
        for thread in profiler._disable_profiler_legacy():
            for event in thread:
                if str(event.kind()) == "memory_alloc":
                    changes.append(event.cpu_memory_usage() + event.cuda_memory_usage())


def _reckoned(node: fx.Node) -> float:
    """Microseconds, from FLOPs and bytes."""
    made = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]
    given = [each.meta.get("val") for each in node.all_input_nodes]
    tensors = [*made, *(each for each in tree_leaves(given) if isinstance(each, torch.Tensor))]
    kind = "cuda" if any(each.device.type == "cuda" for each in tensors) else "cpu"
    moved = sum(elements(each) * each.dtype.itemsize for each in tensors)
    return _CALL + max(_flops(node) / _FLOPS[kind], moved / _BYTES[kind])


def _flops(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = tree_map(
        lambda each: each.meta.get("val") if isinstance(each, fx.Node) else each,
        (node.args, node.kwargs),
        is_leaf=lambda each: isinstance(each, fx.Node),
    )
    return float(as_int(count(*args, **kwargs, out_val=node.meta.get("val"))))


def elements(tensor: torch.Tensor) -> int:
    """How many it has; symbols count as their hints."""
    total = 1
    for each in tensor.shape:
        total *= as_int(each)
    return total
