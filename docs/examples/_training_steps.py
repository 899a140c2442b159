"""Training by minibatches, on plain arrays or within a cache: one program, the same parameters bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
from autograd import value_and_grad
from autograd.core import VJPNode, add_outgrads, vspace
from autograd.tracer import new_box, trace_stack
from autograd.util import toposort
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no types

import recompute as rc
import recompute_autograd  # noqa: F401  # autograd knows recomputable arrays from here on
from _training_network import Array, Digits, initial, loss, operation, scores


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    depth: int = 32
    channels: int = 16
    batch: int = 128
    steps: int = 112
    rate: float = 1e-3
    seed: int = 0
    library: str = "numpy"
    foresight: bool = True
    """Whether the cache learns from one step for the next; its plans take memory of their own."""

    @property
    def xp(self) -> Any:
        """The library that makes the arrays."""
        return import_module(self.library)

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds of the processor, which other programs hardly change; of the wall where a GPU computes."""
        return process_time if self.library == "numpy" else perf_counter

    @property
    def allowance(self) -> int:
        """Bytes that a step may take beyond what the cache counts.

        That is temporary arrays, of which the patches of a convolution are the largest; and, for each layer, autograd's
        tape and the recipes of the cache, which are Python objects.
        """
        return 1_000_000 + 25_000 * self.depth

    @property
    def result(self) -> int:
        """Bytes of the largest result of an operation: activations, or what `adam` makes for the scores' weights."""
        return 4 * 64 * self.channels * max(self.batch, 3 * 10)

    def start(self) -> list[Array]:
        """The parameters before the first step."""
        return [self.xp.asarray(channel) for channel in initial(self.depth, self.channels, self.seed)]

    def cache(self, budget: int | str | None = None) -> rc.Cache:
        """A cache with that clock."""
        return rc.Cache(budget, clock=self.clock, foresight=self.foresight)


# One step


def gradients(
    function: Callable[..., Any], parameters: list[Array], *data: Array, watch: Callable[[], object] = lambda: None
) -> tuple[Array, list[Array]]:
    """The value of a function, and its derivatives by each parameter; the tape is forgotten as it is read.

    autograd's own `value_and_grad` keeps each array of the forward pass until the way back is over. Here one can go as
    soon as it was used: plain arrays out of memory, recomputable ones out of what the cache takes for needed.
    """
    with trace_stack.new_trace() as level:
        roots = [VJPNode.new_root() for _ in parameters]
        boxes = [new_box(parameter, level, root) for parameter, root in zip(parameters, roots, strict=True)]
        end = function(boxes, *data)
    value, last = end._value, end._node
    waiting = {last: (vspace(value).ones(), False)}
    del boxes, end
    for node in toposort(last):
        if not node.parents:
            continue
        gradient, _ = waiting.pop(node)
        for parent, share in zip(node.parents, node.vjp(gradient), strict=True):
            waiting[parent] = add_outgrads(waiting.get(parent), share)
        node.vjp = None
        del gradient, share
        watch()
    return value, [waiting.pop(root)[0] for root in roots]


def gradients_by_autograd(
    function: Callable[..., Any], parameters: list[Array], *data: Array
) -> tuple[Array, list[Array]]:
    """The same by autograd alone."""
    return value_and_grad(function)(parameters, *data)  # type: ignore[no-any-return]  # autograd has no types


@operation(nout=3)
def adam(
    weights: Array, mean: Array, square: Array, gradient: Array, rates: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """One step of Kingma and Ba (Adam, 2015): new weights, and the moving averages of the gradient and its square."""
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient * gradient
    rate, correction = rates
    return weights - rate * mean / (np.sqrt(square * correction) + 1e-8), mean, square


# All steps


class Run(NamedTuple):
    """What became of a training."""

    parameters: list[Any]
    """Plain arrays of NumPy."""
    losses: list[float]
    seconds: list[float]
    """Of each step."""
    used: list[int]
    """Bytes in the books of the cache after each step."""
    fixed: int
    """Bytes in them before the first step: parameters, moments and a minibatch."""
    stats: rc.Stats | None
    """None: there was no cache."""

    @property
    def digest(self) -> str:
        """Of each bit of the parameters."""
        digest = blake2b(digest_size=8)
        for parameter in self.parameters:
            digest.update(parameter.tobytes())
        return digest.hexdigest()

    @property
    def step_seconds(self) -> float:
        """The median, without the first step."""
        return median(self.seconds[1:] or self.seconds)


Told = Callable[[int, float, "rc.Cache | None"], object]
"""Called after each step: its number, the loss, the cache."""


def train(
    digits: Digits,
    settings: Settings,
    cache: rc.Cache | None = None,
    *,
    derive: Callable[..., tuple[Array, list[Array]]] = gradients,
    told: Told = lambda step, loss, cache: None,
) -> Run:
    """Minibatch Adam; with a cache on recomputable arrays, without one on plain ones. The rest does not know."""
    wrap: Callable[[Array], Array] = (lambda array: array) if cache is None else rc.array
    losses, seconds, used = [], [], []
    fixed = 0
    with threadpool_limits(1, "blas"), within(cache):  # small matrices: threads only wait
        parameters = [wrap(setting) for setting in settings.start()]
        means = [wrap(np.zeros_like(setting)) for setting in settings.start()]
        squares = [wrap(np.zeros_like(setting)) for setting in settings.start()]
        for step, chosen in enumerate(minibatches(len(digits.images), settings), 1):
            start = settings.clock()
            batch = [wrap(digit) for digit in digits.take(chosen)]
            if cache is not None and step == 1:
                fixed = cache.stats().used
            value, found = derive(loss, parameters, *batch)
            losses.append(float(value))
            del value, batch  # the loss remembers how it was made: from old parameters
            rates = settings.rate / (1 - 0.9**step), 1 / (1 - 0.999**step)
            for at in range(len(parameters)):
                new = adam(parameters[at], means[at], squares[at], found.pop(0), rates)
                parameters[at], means[at], squares[at] = map(detached, new)
                del new
            seconds.append(settings.clock() - start)
            if cache is not None:
                used.append(cache.stats().used)
            told(step, losses[-1], cache)
        plain = [on_host(parameter) for parameter in parameters]
    return Run(plain, losses, seconds, used, fixed, None if cache is None else cache.stats())


@contextmanager
def within(cache: rc.Cache | None) -> Iterator[None]:
    """The cache, if there is one, sees the steps. Afterwards it plans no more: what is measured next is alone."""
    if cache is None:
        yield
        return
    with cache:
        try:
            yield
        finally:
            cache.next_iteration(last=True)


def minibatches(count: int, settings: Settings) -> Iterator[Any]:
    """Which digits each step is to see: all of them in an order drawn by chance, then all of them in another one."""
    random = np.random.default_rng(settings.seed)
    waiting = np.empty(0, np.intp)
    for _ in range(settings.steps):
        while len(waiting) < settings.batch:
            waiting = np.concatenate([waiting, random.permutation(count)])
        chosen, waiting = waiting[: settings.batch], waiting[settings.batch :]
        yield settings.xp.asarray(chosen)


def detached(array: Array) -> Array:
    """A new step starts from here: how the array was made is forgotten."""
    return array.detach() if isinstance(array, rc.Recomputable) else array


def on_host(array: Array) -> Any:
    """Out of the cache, and off the GPU."""
    while hasattr(array, "get"):
        array = array.get()
    return array


def accuracy(parameters: Sequence[Any], digits: Digits) -> float:
    """The share of digits that are recognised."""
    found = scores(parameters, on_host(digits.images)).argmax(1)
    return float((found == on_host(digits.wanted).argmax(1)).mean())
