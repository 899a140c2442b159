"""A deep convolutional network learns handwritten digits in a fraction of the memory, and becomes the same network.

The model, its derivatives (HIPS autograd) and Adam are ordinary array code: they run on plain arrays, and on
recomputable ones. What the way back will need from the way forth is then the cache's business, and the parameters are
the same, bit for bit. The script trains within a budget; measures memory and time for several (`--table`); and finds
how large a batch and how deep a network fit into a fixed one, with the cache and without (`--largest`). CuPy's arrays
take the same path (`--library cupy`).

    python docs/examples/training.py --budget 0.2
    python docs/examples/training.py --table --largest --picture training.png --json training.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final, NamedTuple

import numpy as np
from autograd import value_and_grad
from autograd.core import VJPNode, add_outgrads, vspace
from autograd.extend import defvjp, primitive
from autograd.tracer import new_box, trace_stack
from autograd.util import toposort
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no types

import recompute as rc
import recompute_autograd  # noqa: F401  # autograd knows recomputable arrays from here on
from recompute.events import Event, Performed
from recompute.pictures import memory, save

Array = Any  # NumPy's, CuPy's, or a recomputable one

SHARES: Final = (1.0, 0.75, 0.5, 0.3, 0.2)
FACTORS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
PATCHED: Final = 16  # images that a function has temporary arrays for at a time


# Array code. Bodies see plain arrays; NumPy's functions hand them over to CuPy where they are CuPy's.


def operation(nout: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of arrays one operation of the cache if any array is recomputable, else call it."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        lifted = rc.lift(nout=nout)(function)

        @wraps(function)
        def either(*args: Any) -> Any:
            return (lifted if any(isinstance(each, rc.Recomputable) for each in args) else function)(*args)

        return either

    return decorate


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
@operation()
def convolve(x: Array, weights: Array) -> Array:
    """Images (n, height, width, from) with kernels (3, 3, from, to); zeros around the images."""
    return convolved(x, weights)


@operation()
def convolve_back(gradient: Array, weights: Array) -> Array:
    """The gradient of `convolve` by its images: kernels turned around, and from and to exchanged."""
    return convolved(gradient, weights[::-1, ::-1].swapaxes(2, 3))


@operation()
def correlate(x: Array, gradient: Array) -> Array:
    """The gradient of `convolve` by its kernels."""
    channels = gradient.shape[-1]
    total = np.zeros_like(x, shape=(9 * x.shape[-1], channels))
    for at in range(0, len(x), PATCHED):
        total += patches(x[at : at + PATCHED]).T @ gradient[at : at + PATCHED].reshape(-1, channels)
    return total.reshape(3, 3, -1, channels)


def convolved(x: Array, weights: Array) -> Array:
    kernels = weights.reshape(-1, weights.shape[-1])
    result = np.empty_like(x, shape=(*x.shape[:-1], weights.shape[-1]))
    for at in range(0, len(x), PATCHED):
        part = result[at : at + PATCHED]
        part[...] = (patches(x[at : at + PATCHED]) @ kernels).reshape(part.shape)
    return result


def patches(x: Array) -> Array:
    """The 3 x 3 pixels around each pixel of a few images, a row for each: nine times their memory."""
    images, height, width, channels = x.shape
    padded = np.zeros_like(x, shape=(images, height + 2, width + 2, channels))
    padded[:, 1:-1, 1:-1] = x
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, 9 * channels)


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
@operation()
def rectify(x: Array) -> Array:
    """What is negative becomes zero."""
    return np.maximum(x, 0)


@operation()
def rectify_back(gradient: Array, result: Array) -> Array:
    """The gradient of `rectify`, by what it returned."""
    found = np.empty_like(result)
    for at in range(0, len(result), PATCHED):
        found[at : at + PATCHED] = gradient[at : at + PATCHED] * (result[at : at + PATCHED] > 0)
    return found


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
@operation()
def cross_entropy(scores: Array, wanted: Array) -> Array:
    """The mean over images of -log P(the digit); scores and digits (as ones among zeros) of shape (n, 10)."""
    scores = scores - scores.max(1, keepdims=True)
    return (np.log(np.exp(scores).sum(1)) - (scores * wanted).sum(1)).mean()


@operation()
def cross_entropy_back(gradient: Array, scores: Array, wanted: Array) -> Array:
    """The gradient of `cross_entropy` by the scores."""
    likely = np.exp(scores - scores.max(1, keepdims=True))
    return (likely / likely.sum(1, keepdims=True) - wanted) * (gradient / len(scores)).astype(scores.dtype)


defvjp(
    convolve,
    lambda result, x, weights: lambda gradient: convolve_back(gradient, weights),
    lambda result, x, weights: lambda gradient: correlate(x, gradient),
)
defvjp(rectify, lambda result, x: lambda gradient: rectify_back(gradient, result))
defvjp(
    cross_entropy, lambda result, scores, wanted: lambda gradient: cross_entropy_back(gradient, scores, wanted), None
)


@operation(nout=3)
def adam(
    weights: Array, mean: Array, square: Array, gradient: Array, rates: tuple[float, float]
) -> tuple[Array, Array, Array]:
    """One step of Kingma and Ba (Adam, 2015): new weights, and the moving averages of the gradient and its square."""
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient * gradient
    rate, correction = rates
    return weights - rate * mean / (np.sqrt(square * correction) + 1e-8), mean, square


# The network


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

    def cache(self, budget: int | str | None = None) -> rc.Cache:
        """A cache with that clock."""
        return rc.Cache(budget, clock=self.clock)


class Digits(NamedTuple):
    """Images (n, 8, 8, 1), from 0 to 1, and what they show: ones among zeros, (n, 10)."""

    images: Array
    wanted: Array

    def take(self, chosen: Any) -> Digits:
        return Digits(self.images[chosen], self.wanted[chosen])


def load(xp: Any = np) -> tuple[Digits, Digits]:
    """1,437 digits to learn from and 360 to be examined in, that come with scikit-learn, in single precision."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order, :, :, None] / 16).astype(np.float32)
    wanted = np.eye(10, dtype=np.float32)[found.target[order]]
    digits = Digits(xp.asarray(images), xp.asarray(wanted))
    return digits.take(slice(360, None)), digits.take(slice(360))


def initial(settings: Settings) -> list[Array]:
    """Kernels and biases of each layer, then of the scores."""
    random = np.random.default_rng(settings.seed)
    found: list[Any] = []
    before = 1
    for layer in range(settings.depth):
        scale = (2 / (9 * before)) ** 0.5 * (1 if layer == 0 else 1 / settings.depth)
        found += [scale * random.normal(size=(3, 3, before, settings.channels)), np.zeros(settings.channels)]
        before = settings.channels
    found += [0.1 * random.normal(size=(64 * before, 10)) / (64 * before) ** 0.5, np.zeros(10)]
    return [settings.xp.asarray(each.astype(np.float32)) for each in found]


def scores(parameters: Sequence[Array], x: Array) -> Array:
    """A residual network: each layer adds something to what the one before it found."""
    *layers, weights, bias = parameters
    x = rectify(convolve(x, layers[0]) + layers[1])
    for kernels, offset in zip(layers[2::2], layers[3::2], strict=True):
        x = x + rectify(convolve(x, kernels) + offset)
    return x.reshape((len(x), -1)) @ weights + bias


def loss(parameters: Sequence[Array], images: Array, wanted: Array) -> Array:
    """What training makes small."""
    return cross_entropy(scores(parameters, images), wanted)


def gradients(
    function: Callable[..., Any], parameters: list[Array], *data: Array, watch: Callable[[], object] = lambda: None
) -> tuple[Array, list[Array]]:
    """The value of a function, and its derivatives by each parameter; the tape is forgotten as it is read.

    autograd's own `value_and_grad` keeps each array of the way forth until the way back is over. Here one can go as
    soon as it was used: plain arrays out of memory, recomputable ones out of what the cache takes for needed.
    """
    with trace_stack.new_trace() as level:
        roots = [VJPNode.new_root() for _ in parameters]
        boxes = [new_box(each, level, root) for each, root in zip(parameters, roots, strict=True)]
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


# Training


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
        for each in self.parameters:
            digest.update(each.tobytes())
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
    with threadpool_limits(1, "blas"), nullcontext() if cache is None else cache:  # small matrices: threads only wait
        parameters = [wrap(each) for each in initial(settings)]
        means = [wrap(np.zeros_like(each)) for each in initial(settings)]
        squares = [wrap(np.zeros_like(each)) for each in initial(settings)]
        for step, chosen in enumerate(minibatches(len(digits.images), settings), 1):
            start = settings.clock()
            batch = [wrap(each) for each in digits.take(chosen)]
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
        plain = [on_host(each) for each in parameters]
    return Run(plain, losses, seconds, used, fixed, None if cache is None else cache.stats())


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


# Measurements


def budget_for(share: float, free: Run) -> int:
    """Bytes: what is always there, and a share of what an unlimited run had beyond that at its peak: the activations.

    Always there are parameters, moments and a minibatch: no cache can do without them.
    """
    return free.fixed + round(share * (peak(free) - free.fixed))


def unlimited(digits: Digits, settings: Settings, steps: int = 2) -> Run:
    """A few steps without a budget, to see what they need."""
    return train(digits, replace(settings, steps=steps), settings.cache())


def peak(run: Run) -> int:
    """The most bytes in the books of the cache."""
    assert run.stats is not None
    return run.stats.peak


def traced(function: Callable[[], object]) -> int:
    """The most bytes, of arrays and of Python's objects, that were allocated at once while the function ran."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def tabulate(
    digits: Digits, settings: Settings, shares: Sequence[float], told: Callable[[str], object]
) -> dict[str, Any]:
    """Memory, in the books of the cache and by tracemalloc, and time, for each budget; parameters compared.

    tracemalloc makes everything slower, so what it sees is a run of its own, of two steps.
    """
    short = replace(settings, steps=2)
    rows: list[dict[str, Any]] = []
    runs: list[Run] = []

    def add(name: str, cached: bool, budget: int | None = None, derive: Callable[..., Any] = gradients) -> None:
        def make() -> rc.Cache | None:
            return settings.cache(budget) if cached else None

        told(f"{name}: time")
        row: dict[str, Any] = {"name": name}
        rows.append(row)
        try:
            run = train(digits, settings, make(), derive=derive)
        except rc.BudgetError as error:
            row["error"] = str(error)
            return
        runs.append(run)
        told(f"{name}: memory")
        row["traced"] = traced(lambda: train(digits, short, make(), derive=derive))
        row |= {"milliseconds": 1000 * run.step_seconds, "loss": run.losses[-1], "digest": run.digest}
        if run.stats is not None:
            row |= {"budget": budget, "flat": len(set(run.used)) == 1}
            for figure in ("peak", "overshoot", "overhead", "evictions", "rematerializations"):
                row[figure] = getattr(run.stats, figure)

    if settings.library == "numpy":  # autograd knows no other plain arrays
        add("plain, autograd", False, derive=gradients_by_autograd)
        add("plain", False)
    add("no budget", True)
    free = runs[-1]
    for share in shares:
        add(f"{share:.0%}", True, budget_for(share, free))
    return {"rows": rows, "fixed": free.fixed, "equal": len({run.digest for run in runs}) == 1}


class Stalled(Exception):
    """So much is recomputed that it is no use to go on."""


def enlarge(
    digits: Digits, settings: Settings, name: str, factors: Sequence[float], told: Callable[[str], object]
) -> dict[str, Any]:
    """How much of a setting (`batch`, `depth`) fits into the memory that the settings take without a budget.

    For each multiple of it: memory; compute within the budget over that without; and the same for the whole time.
    """
    budget = peak(unlimited(digits, settings))
    rows: list[dict[str, Any]] = []
    for factor in factors:
        size = round(factor * getattr(settings, name))
        told(f"{name} {size}")
        larger = replace(settings, **{name: size}, steps=4)
        free = unlimited(digits, larger, steps=larger.steps)
        row: dict[str, Any] = {"factor": factor, "size": size, "needs": peak(free)}
        rows.append(row)
        try:
            run = patient(digits, larger, budget, free)
        except rc.BudgetError as error:
            row |= {"fits": False, "error": str(error)}
            break
        except Stalled as error:
            row |= {"fits": True, "error": str(error)}
            break
        assert run.stats is not None
        row |= {"fits": True, "peak": run.stats.peak, "overhead": run.stats.overhead}
        row |= {"milliseconds": 1000 * run.step_seconds, "time": run.step_seconds / free.step_seconds}
        row |= {"equal": run.digest == free.digest, "allowance": larger.allowance}
        row["traced"] = traced(partial(careful, digits, replace(larger, steps=2), budget))
    return {"setting": name, "base": getattr(settings, name), "budget": budget, "rows": rows}


def careful(
    digits: Digits, settings: Settings, budget: int, watch: Callable[[rc.Cache], object] = lambda cache: None
) -> Run:
    """Training that never exceeds the budget, not even by one result whose size is not known beforehand.

    Such results come up in the first step, so it has less to spend.
    """
    cache = settings.cache(max(1, budget - settings.result))

    def learnt(step: int, loss: float, _: rc.Cache | None) -> None:
        cache.budget = budget

    return train(digits, settings, cache, derive=partial(gradients, watch=lambda: watch(cache)), told=learnt)


def patient(digits: Digits, settings: Settings, budget: int, free: Run) -> Run:
    """`careful`, but given up when it has recomputed more than all its steps take. Raises Stalled then.

    `free`: the same steps without a budget.
    """
    assert free.stats is not None
    patience = free.stats.model_time

    def watch(cache: rc.Cache) -> None:
        if cache.stats().remat_time > patience:
            raise Stalled("more is computed again than for the first time")

    return careful(digits, settings, budget, watch)


# What is shown


def draw(digits: Digits, settings: Settings, shares: Sequence[float], path: str | Path) -> Path:
    """Memory over one step, for some budgets and without one. Raises ImportError without matplotlib."""
    free = unlimited(digits, settings)
    whole, _ = last_step(digits, settings, None)
    tracks, marks = {}, {}
    for share in shares:
        budget = budget_for(share, free)
        name = f"{share:.0%} of the activations: {budget / 1e6:.1f} MB"
        with suppress(rc.BudgetError):
            tracks[name], marks[name] = last_step(digits, settings, budget)
    title = f"One step of {settings.depth} layers on {settings.batch} images"
    return save(memory(tracks, whole=whole, title=title, marks=marks), path)


def last_step(digits: Digits, settings: Settings, budget: int | None) -> tuple[list[Event], list[tuple[float, str]]]:
    """The events of the last of three steps, from time 0 on; and when the way back starts."""
    cache = settings.cache(budget)
    events: list[Event] = []

    def told(step: int, loss: float, _: rc.Cache | None) -> None:
        if step == 2:
            cache.subscribe(events.append)

    train(digits, replace(settings, steps=3), cache, told=told)
    start = events[0].time
    events = [replace(event, time=event.time - start) for event in events]
    back = next(each for each in events if isinstance(each, Performed) and each.function == "cross_entropy_back")
    return events, [(back.time - back.cost, "backward pass")]


def budget_table(found: dict[str, Any], settings: Settings) -> tuple[list[str], list[list[str]]]:
    """The rows of `tabulate` as cells."""
    columns = ["activations", "budget", "peak", "traced", "beyond", "compute", "ms a step", "time", "parameters"]
    base = next(row for row in found["rows"] if row["name"] == "no budget")
    cells = []
    for row in found["rows"]:
        if "error" in row:
            cells.append([row["name"], "does not fit", *[""] * (len(columns) - 2)])
            continue
        budget, books, over = row.get("budget"), row.get("peak"), row.get("overhead")
        bound = budget or books
        cells.append(
            [
                row["name"],
                megabytes(budget),
                megabytes(books),
                megabytes(row["traced"]),
                megabytes(row["traced"] - bound if bound else None),
                f"x {over:.2f}" if over else "",
                f"{row['milliseconds']:.0f}",
                f"x {row['milliseconds'] / base['milliseconds']:.2f}",
                row["digest"],
            ]
        )
    return columns, cells


def size_table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The rows of `enlarge` as cells."""
    columns = [found["setting"], "", "without", "peak", "traced", "compute", "time", "ms a step"]
    cells = []
    for row in found["rows"]:
        first = [f"x {row['factor']:g}", str(row["size"]), megabytes(row["needs"])]
        if "error" not in row:
            first += [megabytes(row["peak"]), megabytes(row["traced"])]
            first += [f"x {row['overhead']:.2f}", f"x {row['time']:.2f}", f"{row['milliseconds']:.0f}"]
        else:
            first += ["too slow" if row["fits"] else "does not fit", *[""] * 4]
        cells.append(first)
    return columns, cells


def megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.2f} MB"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """With rich if it is installed, plain elsewhere."""
    print(f"\n{title}")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for line in (columns, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    else:
        table = Table(box=None, header_style="dim")
        for name in columns:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


@contextmanager
def progress(steps: int) -> Iterator[Told]:
    """A bar on stderr, with loss and memory, if rich is installed and somebody watches; else a line now and then."""

    def words(loss: float, cache: rc.Cache | None) -> str:
        if cache is None:
            return f"loss {loss:.3f}"
        most = "" if cache.budget is None else f" of {megabytes(cache.budget)}"
        return f"loss {loss:.3f}, memory {megabytes(cache.stats().peak)}{most}"

    try:
        from rich.console import Console
        from rich.progress import Progress, TextColumn
    except ImportError:
        watched = False
    else:
        console = Console(stderr=True)
        watched = console.is_terminal
    if not watched:
        every = max(1, steps // 10)

        def tell(step: int, loss: float, cache: rc.Cache | None) -> None:
            if step % every == 0 or step == steps:
                print(f"step {step} of {steps}: {words(loss, cache)}", file=sys.stderr)

        yield tell
        return
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[words]}"), console=console) as bar:
        task = bar.add_task("training", total=steps, words="")
        yield lambda step, loss, cache: bar.update(task, completed=step, words=words(loss, cache))


def confine(extra: int) -> None:
    """Let the system refuse this process more address space than it has now, and `extra` bytes. Linux."""
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits within a memory budget.")
    add = parser.add_argument
    add("--budget", default="0.5", help="bytes (12MB), or a share of the activations (0.3); default %(default)s")
    add("--plain", action="store_true", help="plain arrays, no cache")
    add("--epochs", type=int, default=10, metavar="N", help="passes through the digits; default %(default)s")
    add("--batch", type=int, default=128, metavar="N", help="images in a minibatch; default %(default)s")
    add("--depth", type=int, default=32, metavar="N", help="layers; default %(default)s")
    add("--channels", type=int, default=16, metavar="N", help="of each layer; default %(default)s")
    add("--library", choices=["numpy", "cupy"], default="numpy", help="whose arrays; default %(default)s")
    add(
        "--confine",
        type=bytes_of,
        metavar="BYTES",
        help="let the system enforce it: as much address space beyond that of the start",
    )
    add("--table", action="store_true", help="memory and time for several budgets")
    add("--budgets", type=float, nargs="+", default=[*SHARES], metavar="SHARE", help="of the activations, for --table")
    add("--largest", action="store_true", help="the largest batch, and the deepest network, in the same memory")
    add("--factors", type=float, nargs="+", default=[*FACTORS], metavar="X", help="multiples to try for --largest")
    add("--picture", metavar="PATH", help="draw the memory over a step: .png, .svg or .pdf")
    add("--json", metavar="PATH", help="write the figures")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.epochs, options.batch, options.depth, options.channels) < 1:
        parser.error("epochs, batch, depth and channels are at least 1")
    settings = Settings(options.depth, options.channels, options.batch, library=options.library)
    learn, examine = load(settings.xp)
    settings = replace(settings, steps=max(1, options.epochs * len(learn.images) // options.batch))

    cache = None
    if not options.plain:
        try:
            cache = settings.cache(within(options.budget, learn, settings))
        except ValueError as error:
            parser.error(str(error))
    if options.confine:
        train(learn, replace(settings, depth=2, batch=PATCHED, steps=1))  # BLAS takes buffers of its own at first use
        confine(options.confine)
    try:
        with progress(settings.steps) as told:
            run = train(learn, settings, cache, told=told)
    except MemoryError as error:  # BudgetError is one
        print(f"it does not fit: {error}", file=sys.stderr)
        return 1
    found: dict[str, Any] = {
        "machine": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "autograd": version("autograd"),
            "cores": os.cpu_count(),
        },
        "settings": {field.name: getattr(settings, field.name) for field in fields(settings)},
        "training": {
            "parameters": sum(each.size for each in run.parameters),
            "loss": run.losses[-1],
            "accuracy": accuracy(run.parameters, examine),
            "digest": run.digest,
            "milliseconds": 1000 * run.step_seconds,
            "budget": None if cache is None else cache.budget,
            "peak": None if run.stats is None else run.stats.peak,
            "overhead": None if run.stats is None else run.stats.overhead,
        },
    }
    for line in report(found["training"], settings):
        print(line)

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    if options.table:
        found["table"] = tabulate(learn, settings, options.budgets, tell)
        tell("")
        print_table(f"{settings.depth} layers, {settings.batch} images", *budget_table(found["table"], settings))
        print("parameters:", "equal to the last bit" if found["table"]["equal"] else "NOT EQUAL")
    if options.largest:
        found["largest"] = [enlarge(learn, settings, name, options.factors, tell) for name in ("batch", "depth")]
        tell("")
        for each in found["largest"]:
            print_table(f"{each['setting']} within {megabytes(each['budget'])}", *size_table(each))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.picture:
        try:
            print("picture:", draw(learn, settings, (0.5, 0.2), options.picture))
        except (ImportError, ValueError) as error:  # no matplotlib, no such format, or no budget that fits
            print(f"no picture: {error}", file=sys.stderr)
    rows = [row for each in found.get("largest", []) for row in each["rows"]]
    equal = all(each.get("equal", True) for each in [found.get("table", {}), *rows])
    return 0 if equal else 1


def within(budget: str, digits: Digits, settings: Settings) -> int:
    """Bytes, of a budget as it is written. Raises ValueError if it makes no sense."""
    if re.fullmatch(r"[01]?\.?\d+", budget) and 0 < float(budget) <= 1:
        return budget_for(float(budget), unlimited(digits, settings))
    return bytes_of(budget)


def bytes_of(size: str) -> int:
    """1000000 of "1000000", of "1000kB" and of "1MB"."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*([kMG]?)B?", size)
    if not found or not float(found[1]):
        raise ValueError(f"{size!r} is not a size; write bytes, or text such as 12MB")
    return int(float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]])


def report(found: dict[str, Any], settings: Settings) -> list[str]:
    """What a training came to, in words."""
    lines = [
        f"network      {settings.depth} layers, {found['parameters']:,} parameters, {settings.batch} images a step",
        f"training     {settings.steps} steps of {found['milliseconds']:.0f} ms, loss {found['loss']:.3f}",
        f"recognised   {found['accuracy']:.1%} of digits never seen before",
        f"parameters   {found['digest']}",
    ]
    if found["budget"] is not None:
        lines.append(f"memory       {megabytes(found['peak'])} within {megabytes(found['budget'])}")
        lines.append(f"compute      x {found['overhead']:.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
