"""Measures what it costs to track an operation whose values stay in memory, and to run it again when they do not.

Every figure is microseconds for one operation; "added to the bare call" is what the library adds to the function
itself. Measured in the same run, in turns: the bare call, the least that a tracked operation can be in pure Python (the
floor: an object with function, arguments and value), dask.delayed, cachey and HIPS autograd's tracing. The cyclic
garbage collector stays enabled, as in any program, unless a line says otherwise. When many operations are alive it
costs more than the bookkeeping.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from _common import Measure, Report, Row, Target, in_turns, main, missing, row, say

import recompute as rc

Step = Callable[[Any], Any]


def trivial(value: int) -> int:
    """A function that costs next to nothing, so that nearly all the time is the machinery."""
    return value + 1


def closure() -> Step:
    """The same with a number that it closes over."""
    one = 1
    return lambda value: value + one


class Adder:
    """The same as a method of an object."""

    def __init__(self) -> None:
        self.one = 1

    def add(self, value: int) -> int:
        return value + self.one


class Node:
    """The floor: a tracked operation with nothing but its function, its arguments and its value."""

    __slots__ = ("arguments", "function", "value")
    arguments: tuple[Node, ...]
    value: Any

    def __init__(self, function: Callable[..., Any], *arguments: Node) -> None:
        self.function = function
        self.arguments = arguments
        self.value = function(*[argument.value for argument in arguments])


class Source(Node):
    """A node that was given its value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def bare(step: Step, start: Any, count: int) -> float:
    value = start
    began = perf_counter()
    for _ in range(count):
        value = step(value)
    return (perf_counter() - began) / count


def floor(count: int) -> float:
    node: Node = Source(0)
    began = perf_counter()
    for _ in range(count):
        node = Node(trivial, node)
    seconds = (perf_counter() - began) / count
    while node.arguments if type(node) is Node else ():  # from the end: dropping a deep chain of them recurses
        node = node.arguments[0]
    return seconds


def kept(count: int, budget: str | None = None, step: Step = trivial) -> float:
    """A chain with every value kept."""
    with rc.Cache(budget):
        value = rc.pure(0)
        values = [value]
        began = perf_counter()
        for _ in range(count):
            value = rc.ap(step, value)
            values.append(value)
        return (perf_counter() - began) / count


def last_kept(step: Step, start: Any, count: int, budget: str | None = None) -> float:
    """A chain with only the last value kept: each step also releases the one before it, which is evicted."""
    with rc.Cache(budget):
        value = rc.pure(start)
        began = perf_counter()
        for _ in range(count):
            value = rc.ap(step, value)
        return (perf_counter() - began) / count


def without_collector(measure: Measure) -> float:
    gc.disable()
    try:
        return measure()
    finally:
        gc.enable()


def get_resident(count: int) -> float:
    with rc.Cache():
        value = rc.ap(trivial, rc.pure(0))
        empty = _empty_loop(count)
        began = perf_counter()
        for _ in range(count):
            value.get()
        return (perf_counter() - began) / count - empty


def _empty_loop(count: int) -> float:
    began = perf_counter()
    for _ in range(count):
        pass
    return (perf_counter() - began) / count


def away_and_back(depth: int) -> tuple[float, float, float]:
    """Along a chain: evict each value; one `get` of the last one, which brings all back; drop the whole chain."""
    with rc.Cache():
        value = rc.pure(0)
        values = []
        for _ in range(depth):
            value = rc.ap(trivial, value)
            values.append(value)
        began = perf_counter()
        for member in values:
            member.evict()
        evicted = perf_counter()
        result = value.get()
        back = perf_counter()
        assert result == depth
        del member, values
        dropping = perf_counter()
        del value
        return (evicted - began) / depth, (back - evicted) / depth, (perf_counter() - dropping) / depth


def bookkeeping(count: int, keep: bool) -> float:
    """Bytes that a tracked operation takes besides its value: what the interpreter allocates, by tracemalloc."""
    constant = 10**9
    always = lambda _: constant
    values = [None] * count
    with rc.Cache():
        value = rc.pure(0)
        gc.collect()
        tracemalloc.start()
        for number in range(count):
            value = rc.ap(always, value)
            if keep:
                values[number] = value
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return size / count


def dask_delayed(count: int) -> tuple[float, float]:
    """Build a chain, and compute it in this thread."""
    from dask.delayed import delayed

    lazy = delayed(trivial, pure=False)
    began = perf_counter()
    value = 0
    for _ in range(count):
        value = lazy(value)
    built = perf_counter()
    assert value.compute(scheduler="synchronous") == count  # type: ignore[attr-defined]
    return (built - began) / count, (perf_counter() - built) / count


def cachey_put_and_hit(count: int) -> tuple[float, float]:
    """Distinct keys into a cache with room for all, then each once more."""
    from cachey import Cache

    cache = Cache(1e9, limit=0)
    began = perf_counter()
    for key in range(count):
        cache.put(key, key, cost=1, nbytes=32)
    put = perf_counter()
    for key in range(count):
        assert cache.get(key) == key
    return (put - began) / count, (perf_counter() - put) / count


def autograd_forward(count: int) -> float:
    """Trace a chain of small additions, without the way back."""
    import autograd.numpy as anp
    from autograd import make_vjp

    def chain(value: Any) -> Any:
        for _ in range(count):
            value = anp.add(value, 1.0)
        return value

    start = anp.zeros(8)
    began = perf_counter()
    make_vjp(chain)(start)
    return (perf_counter() - began) / count


def _arrays(report: Report, quick: bool) -> None:
    """Small arrays and arrays of 1 MiB, compared with the bare NumPy call and autograd's trace of it."""
    names = ("np.add of 8 numbers", "np.add of 1 MiB")
    if find_spec("numpy") is None:
        report.rows += [missing(f"{name}, {how}") for name in names for how in ("bare", "tracked, last kept")]
        report.rows.append(missing("np.add of 8 numbers, traced by autograd"))
        return
    import numpy as np

    import recompute_numpy

    rc.adapters.register(np.ndarray, recompute_numpy.adapter)  # also where the packages are not installed

    def add_one(array: Any) -> Any:
        return np.add(array, 1.0)

    small, large = np.zeros(8), np.zeros(2**17)
    counts = (2_000, 100) if quick else (20_000, 2_000)
    measures: dict[str, Measure] = {}
    for name, array, count in zip(names, (small, large), counts, strict=True):
        measures[f"{name}, bare"] = lambda a=array, n=count: bare(add_one, a, n)  # type: ignore[misc]
        measures[f"{name}, tracked, last kept"] = lambda a=array, n=count: last_kept(add_one, a, n)  # type: ignore[misc]
        measures[f"{name}, tracked, budget of 1 GB"] = lambda a=array, n=count: last_kept(add_one, a, n, "1GB")  # type: ignore[misc]
    traced = "np.add of 8 numbers, traced by autograd"
    if find_spec("autograd") is not None:
        measures[traced] = lambda: autograd_forward(1_000)
    for name, seconds in in_turns(measures, 2 if quick else 5).items():
        report.rows.append(row(name, seconds))
    if traced not in measures:
        report.rows.append(missing(traced))
    for name in names:
        report.ratio(f"{name}: tracked / bare", f"{name}, tracked, last kept", f"{name}, bare")
    if traced in measures:
        base = report.row(f"{names[0]}, bare").known
        ours = report.row(f"{names[0]}, tracked, last kept").known - base
        theirs = report.row(traced).known - base
        report.ratios.append(("added to the bare np.add: autograd's trace / ours", theirs / ours))


def _peers(report: Report, quick: bool) -> None:
    repetitions = 2 if quick else 5
    pairs: tuple[tuple[str, tuple[str, str], Callable[[int], tuple[float, float]]], ...] = (
        ("dask", ("dask.delayed, build (chain of 1,000)", "dask.delayed, compute, synchronous"), dask_delayed),
        ("cachey", ("cachey, put", "cachey, hit"), cachey_put_and_hit),
    )
    for package, names, measure in pairs:
        if find_spec(package) is None:
            report.rows += [missing(name) for name in names]
            continue
        both = []
        for _ in range(repetitions):
            gc.collect()
            both.append(measure(1_000))
        report.rows += [row(name, [pair[which] for pair in both]) for which, name in enumerate(names)]


def _chains(report: Report, quick: bool) -> list[tuple[int, Row]]:
    """Evict, bring back and drop chains of several depths; (depth, row of bringing back)."""
    back = []
    for depth in (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
        say(f"  a chain of {depth:,}")
        times = []
        for _ in range(2 if quick else 3 if depth >= 1_000_000 else 5):
            gc.collect()
            times.append(away_and_back(depth))
        evict, bring, drop = ([time[which] for time in times] for which in range(3))
        report.rows.append(row(f"evict, chain of {depth:,}", evict))
        report.rows.append(row(f"rematerialize, chain of {depth:,}", bring, "one `get` of the last value"))
        back.append((depth, report.rows[-1]))
        both = [one + other for one, other in zip(evict, bring, strict=True)]
        report.rows.append(row(f"evict and rematerialize, chain of {depth:,}", both))
        report.rows.append(row(f"drop, chain of {depth:,}", drop, "the recipes of a chain whose last value was kept"))
    return back


def measure(quick: bool) -> list[Report]:
    report = Report(
        "A tracked operation",
        "Microseconds for one operation. The function adds 1 to a number, so nearly all the time is the machinery.",
    )
    count = 10_000 if quick else 100_000
    say(f"chains of {count:,} operations")
    measures: dict[str, Measure] = {
        "bare call": lambda: bare(trivial, 0, count),
        "a minimal node": lambda: floor(count),
        "tracked, every value kept": lambda: kept(count),
        "tracked, only the last kept": lambda: last_kept(trivial, 0, count),
        "tracked, every value kept, budget never reached": lambda: kept(count, "10 GB"),
        "tracked, only the last kept, budget never reached": lambda: last_kept(trivial, 0, count, "10 GB"),
        "a minimal node, collector disabled": lambda: without_collector(lambda: floor(count)),
        "tracked, every value kept, collector disabled": lambda: without_collector(lambda: kept(count)),
        "tracked, only the last kept, collector disabled": lambda: without_collector(
            lambda: last_kept(trivial, 0, count)
        ),
        "get of a resident value": lambda: get_resident(count),
    }
    for name, seconds in in_turns(measures, 3 if quick else 7).items():
        report.rows.append(row(name, seconds))
    say("chains that go and come back")
    back = _chains(report, quick)
    say("arrays and peers")
    _arrays(report, quick)
    _peers(report, quick)
    for name, keep in (("bookkeeping, value kept", True), ("bookkeeping, value released and evicted", False)):
        size = bookkeeping(2_000 if quick else 20_000, keep)
        report.rows.append(Row(name, size, size, "bytes", "for a chain, by tracemalloc, without the values"))

    tracked = [name for name in measures if name.startswith("tracked") and "collector" not in name]
    _compare(report, tracked, back)
    _judge(report, tracked, back)
    return [report]


def _compare(report: Report, tracked: list[str], back: list[tuple[int, Row]]) -> None:
    """The ratios of the page. `back`: (length of a chain, what bringing it back takes), the shortest first."""
    least = report.row("bare call").known
    lowest = report.row("a minimal node").known - least
    for name in tracked:
        report.ratios.append(
            (f"{name}: added to the bare call / added by the minimal node", (report.row(name).known - least) / lowest)
        )
    shallow, deep = back[0], back[-1]
    report.ratios.append((f"rematerialize, chain of {deep[0]:,} / {shallow[0]:,}", deep[1].known / shallow[1].known))
    report.ratio("dask.delayed, build / tracked, kept", "dask.delayed, build (chain of 1,000)", tracked[0])
    report.ratio("dask.delayed, compute / rematerialize", "dask.delayed, compute, synchronous", back[0][1].name)
    report.ratio("cachey, hit / get of a resident value", "cachey, hit", "get of a resident value")
    report.ratio("cachey, put / tracked, kept", "cachey, put", tracked[0])


def _judge(report: Report, tracked: list[str], back: list[tuple[int, Row]]) -> None:
    """The targets of the page, and whether they are met."""
    least = report.row("bare call").known
    for name in tracked:
        report.targets.append(
            Target(f"{name}, added to the bare call", 3.0, report.row(name).known - least, "us", _about(name))
        )
    report.targets.append(
        Target(
            "get of a resident value",
            0.3,
            report.row("get of a resident value").known,
            "us",
            "A method call, a check whether it is made inside an operation, and the access time.",
        )
    )
    for depth, measured in back:
        report.targets.append(
            Target(
                measured.name,
                6.0,
                measured.known,
                "us",
                f"One `get` reruns {depth:,} operations on an explicit stack, the trivial function included.",
            )
        )
    report.targets.append(
        Target(
            "bookkeeping per operation",
            800.0,
            report.row("bookkeeping, value kept").known,
            "bytes",
            "Operation, value, storage and the reference to them; a released value keeps only its recipe.",
        )
    )


def _about(name: str) -> str:
    sentence = "Nothing is dropped" if "every value" in name else "Each step also releases and evicts the value before"
    if "budget" in name:
        sizes = "the size of each output is looked up before the call and learned after it, for each new argument"
        return f"{sentence}; {sizes}."
    return f"{sentence}; no budget, so no size is looked up."


if __name__ == "__main__":
    main(measure, __doc__)
