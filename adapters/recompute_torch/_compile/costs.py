"""What operators and steps take, in time and in memory: measured once, watched while they run, or estimated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from math import prod
from time import perf_counter
from typing import Any, Final, Literal, get_args
from weakref import ref

import torch
from torch import fx
from torch._C import _autograd as profiler
from torch._C import _profiler
from torch._higher_order_ops.effects import has_effects
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from recompute import extend
from recompute_torch._compile.program import FAR, Price
from recompute_torch._memory import storage_or_none

Run = Callable[[list[Any]], Any]
"""A boxed graph."""
_UNKNOWN_SIZE: Final = 64  # what a size counts as that depends on data


class Shape:
    """What a tensor is beyond its content."""

    def __init__(self, tensor: torch.Tensor, *, channels_last: bool) -> None:
        self.dtype, self.device = tensor.dtype, tensor.device
        self.size = [as_int(size) for size in tensor.shape]
        self.stride = [as_int(size) for size in tensor.stride()]
        if channels_last and len(self.size) == 4:
            _, channels, height, width = self.size
            self.stride = [channels * height * width, 1, width * channels, channels]

    @property
    def length(self) -> int:
        """Elements from the first to the last in memory."""
        ends = [(size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)]
        return 1 + sum(ends) if 0 not in self.size else 0

    @property
    def kind(self) -> Hashable:
        """What shapes have in common that can be in one piece of memory."""
        return self.dtype, self.device

    def memory(self) -> torch.Tensor:
        """One half everywhere, or zero: valid as an index, too."""
        content = 0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        return torch.full((self.length,), content, dtype=self.dtype, device=self.device)

    def make(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, in the memory that is given or in its own."""
        whole = self.memory() if memory is None else memory
        return whole.as_strided(self.size, self.stride)

    def __repr__(self) -> str:
        return f"{self.dtype}{self.size}{self.stride}{self.device}"


def hinted(arguments: Any, *, channels_last: bool = False) -> Any:
    """Shapes instead of tensors, and numbers in that of symbols."""

    def one(given: Any) -> Any:
        value = given.meta.get("val") if isinstance(given, fx.Node) else given
        if isinstance(value, torch.Tensor):
            return Shape(value, channels_last=channels_last)
        return as_int(value) if isinstance(value, torch.SymInt) else value

    return tree_map(one, arguments, is_leaf=lambda value: isinstance(value, fx.Node))


def as_int(size: Any) -> int:
    """A size that may be a symbol."""
    return int(optimization_hint(size, fallback=_UNKNOWN_SIZE))


def made_up(values: Sequence[Any], *, together: bool = False) -> list[Any]:
    """What can be given to kernels instead of values of a graph.

    `together`: floating-point tensors share memory.
    """
    shapes = [hinted(value) for value in values]
    longest: dict[Hashable, Shape] = {}
    for value in shapes:
        if together and isinstance(value, Shape) and value.dtype.is_floating_point:
            longest[value.kind] = max(longest.get(value.kind, value), value, key=lambda shape: shape.length)
    memory = {kind: shape.memory() for kind, shape in longest.items()}
    return [shape.make(memory.get(shape.kind)) if isinstance(shape, Shape) else shape for shape in shapes]


@contextmanager
def elsewhere() -> Iterator[None]:
    """Outside of what is being traced; random numbers that are drawn here do not count."""
    with _disable_current_modes(), torch.no_grad(), drawing_elsewhere():
        yield


@contextmanager
def drawing_elsewhere() -> Iterator[None]:
    """Random numbers that are drawn here do not count."""
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(cuda):
        yield


Costs = Literal["measured", "estimated"]

CHANNELS_LAST: Final = "recompute: channels last"
"""In the meta of a node: pictures that it is given lie so when it runs, whatever their metadata says."""

_MAX_RUNS: Final = 5  # at most
_ENOUGH_SECONDS: Final = 0.02  # seconds of runs of one operator
_FLOPS_PER_US: Final = {"cpu": 5e4, "cuda": 2e7}  # in a microsecond
_BYTES_PER_US: Final = {"cpu": 1e4, "cuda": 1e6}  # moved in a microsecond
_CALL_US: Final = 5.0  # microseconds to start an operator

_known: dict[Hashable, Price] = {}
"""Of this process: (operator, dtypes, shapes, strides, other arguments) -> what it takes."""


def check(costs: Costs, effort: float) -> None:
    """Raise ValueError for what is neither a kind of costs nor an effort of planning."""
    if costs not in get_args(Costs):
        raise ValueError(f"costs is one of {', '.join(get_args(Costs))}, not {costs!r}")
    if not isinstance(effort, (int, float)) or not 0 <= effort < float("inf"):
        raise ValueError(f"effort is a number, 0 or more, not {effort!r}; 1 takes about ten seconds")


class Prices:
    """What gives the price of a node of a graph."""

    def __init__(self, costs: Costs) -> None:
        self._measured = costs == "measured"

    def __call__(self, node: fx.Node) -> Price:
        """With measured costs the operator is run on made-up tensors the first time that it is seen."""
        try:
            args, kwargs = hinted((node.args, node.kwargs), channels_last=node.meta.get(CHANNELS_LAST, False))
            key = (node.target, repr((args, kwargs)), self._measured)
            if key not in _known:
                _known[key] = self._price(node, args, kwargs)
            return _known[key]
        except Exception as error:  # it cannot be run alone: its inputs are special
            if extend.is_interrupt(error):
                raise
            return Price(_reckoned(node), flops=_flops(node))

    def _price(self, node: fx.Node, args: Any, kwargs: Any) -> Price:
        if not isinstance(node.target, torch._ops.OpOverload):
            return Price(_reckoned(node), flops=_flops(node))
        with elsewhere():
            made: Any = tree_map(lambda value: value.make() if isinstance(value, Shape) else value, (args, kwargs))
            seconds, room, hidden = _taken(partial(node.target, *made[0], **made[1]))
            return Price(seconds * 1e6 if self._measured else _reckoned(node), room, hidden, _flops(node))


def room_of(target: Any, args: Any, kwargs: Any) -> int:
    """Bytes that a run of an operator on these tensors needs beside its results, if that is known."""
    try:
        given = repr(hinted((args, kwargs)))
    except (RuntimeError, NotImplementedError):
        return 0
    return max(
        (_known[key].room for key in ((target, given, True), (target, given, False)) if key in _known), default=0
    )


def _taken(run: Callable[[], Any]) -> tuple[float, int, tuple[int, ...]]:
    """Seconds of the fastest of a few runs, bytes at the worst moment of one beyond what it returns, and `hidden`."""
    run()  # what the first run alone allocates is kept by libraries
    most, best, spent = 0, float("inf"), 0.0
    for number in range(_MAX_RUNS):
        with allocations(wanted=not number) as changes:
            start = perf_counter()
            result = run()
            if any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_leaves(result)):
                torch.cuda.synchronize()
            took = perf_counter() - start
        if changes:
            used = list(accumulate(changes))
            most = max(0, *used) - used[-1]
        hidden = tuple(map(_hidden, tree_leaves(result)))
        del result
        best, spent = min(best, took), spent + took
        if spent > _ENOUGH_SECONDS:
            break
    return best, most, hidden


def _hidden(result: Any) -> int:
    """Bytes that its memory has beyond its last element: `col2im` leaves a margin there, for one."""
    storage = storage_or_none(result)
    if storage is None:
        return 0
    last = result.storage_offset() + Shape(result, channels_last=False).length
    return max(0, storage.nbytes() - int(last * result.dtype.itemsize))


@contextmanager
def allocations(*, wanted: bool) -> Iterator[list[int]]:
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
    made = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    given = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [*made, *(leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))]
    kind = "cuda" if any(leaf.device.type == "cuda" for leaf in tensors) else "cpu"
    moved = sum(elements(leaf) * leaf.dtype.itemsize for leaf in tensors)
    return _CALL_US + max(_flops(node) / _FLOPS_PER_US[kind], moved / _BYTES_PER_US[kind])


def _flops(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = tree_map(
        lambda value: value.meta.get("val") if isinstance(value, fx.Node) else value,
        (node.args, node.kwargs),
        is_leaf=lambda value: isinstance(value, fx.Node),
    )
    return float(as_int(count(*args, **kwargs, out_val=node.meta.get("val"))))


def elements(tensor: torch.Tensor) -> int:
    """How many it has; symbols count as their hints."""
    return prod(map(as_int, tensor.shape))


class Meter:
    """Bytes that are in memory because of one step through a graph, and the most that ever were."""

    def __init__(self) -> None:
        self.peak = 0
        self._used = 0
        self._live: dict[int, ref[torch.UntypedStorage]] = {}

    def watch(self, run: Run, args: list[Any], new: Sequence[int]) -> Any:
        """Run a boxed graph; of its arguments, those with the numbers `new` came to be for it."""
        self.add(_storages([args[number] for number in new]))
        with _Watching(self):
            return run(args)

    def made(self, values: Any) -> bool:
        """Whether the tensors in these values came to be in what was watched."""
        return _storages(values).keys() <= self._live.keys()

    def add(self, storages: dict[int, torch.UntypedStorage], room: int = 0) -> None:
        """Count storages, given by address, until they are gone; so much more was in use for a moment."""
        for key, storage in storages.items():
            if key not in self._live:
                self._hold(key, storage)
        self.peak = max(self.peak, self._used + room)

    def _hold(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self._live.pop(key, None)
            self._used -= size

        self._live[key] = ref(storage, gone)
        self._used += size


class Allocations:
    """The peak of a step by the allocators' account: inductor's kernels are no operators that one could watch.

    While the user profiles, nothing is heard, and the peak stays 0.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._used = 0

    def watch(self, run: Run, args: list[Any], new: Sequence[int]) -> Any:
        """Run a boxed graph; of its arguments, those with the numbers `new` came to be for it."""
        arrived = sum(args[number].untyped_storage().nbytes() for number in new)
        with allocations(wanted=True) as changes:
            result = run(args)
        for change in [arrived, *changes] if changes else []:
            self._used += change
            self.peak = max(self.peak, self._used)
        return result

    def made(self, _: Any) -> bool:
        """All steps through a graph allocate the same."""
        return True


class _Watching(TorchDispatchMode):
    """Tells the meter what each operator makes."""

    supports_higher_order_operators = True

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _storages((args, kwargs))
        new = {key: storage for key, storage in _storages(result).items() if key not in given}
        self._meter.add(new, room_of(func, args, kwargs))
        return result


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Those of the tensors in values, by address."""
    found = [storage_or_none(leaf) for leaf in tree_leaves(values)]
    return {storage._cdata: storage for storage in found if storage is not None}


_PLAIN: Final = (operator.getitem, run_and_save_rng_state, run_with_rng_state)


class Part:
    """What is to be known of a graph to run it: it is read before passes change it."""

    def __init__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        self.names = [node.name for node in inputs]
        self.values = [node.meta.get("val") for node in inputs]
        self.returned = [getattr(output, "name", "") for output in tree_leaves(graph.output_node().args)]
        self.harmless = all(map(_harmless, graph.nodes))


class Rehearsal:
    """Of one compiled graph, whose two parts it is told of."""

    def __init__(self) -> None:
        self._parts: dict[bool, tuple[Part, Run]] = {}

    def knows(self, part: Part, run: Run, *, late: bool) -> None:
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
    return isinstance(target, torch._ops.OpOverload) and not has_effects(target) and target.namespace not in FAR
