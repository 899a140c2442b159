"""What `rc.array` adds to the time that NumPy itself takes for an operation, for arrays of 10 to 10^7 elements.

`python benchmarks/arrays.py --into docs/results` writes arrays.md and arrays.json there. Timed in the same run, in
turns with the wrapper: HIPS autograd's tracing of the same operation, and dask.array's (to build it, and to build and
compute it; the synchronous scheduler, one chunk). "Added" is the time of the operation minus that of the same NumPy
call. For large arrays this difference is lost in the noise of the call; look at the ratio there. Results are dropped as
soon as they are made, and that time is included, as it is in the bare call.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Final

import numpy as np
from _common import MICRO, NOT_INSTALLED, Measure, arguments, facts, in_turns, markdown, number, page, publish, say

import recompute as rc

SIZES: Final = tuple(10**power for power in range(1, 8))
SMALL: Final = SIZES[0]
TARGET: Final = 6.0  # microseconds over the bare operation
PEERS: Final = ("wrapped", "within a budget", "autograd", "dask, build", "dask, build and compute")

Operation = Callable[[Any], Any]

OPERATIONS: Final[dict[str, Operation]] = {
    "x + x": lambda x: x + x,
    "x * 2.0": lambda x: x * 2.0,
    "np.tanh(x)": np.tanh,
    "x[1:-1]": lambda x: x[1:-1],
    "x.sum()": lambda x: x.sum(),
    "np.sum(x, axis=0)": lambda x: np.sum(x, axis=0),
    "np.where(x > 0, x, 0.0)": lambda x: np.where(x > 0, x, 0.0),
}


def timed(operation: Operation, x: Any, count: int) -> Measure:
    """Seconds for one operation, whose result is dropped."""

    def measure() -> float:
        began = perf_counter()
        for _ in range(count):
            operation(x)
        return (perf_counter() - began) / count

    return measure


def traced(operation: Operation, plain_array: Any, count: int) -> Measure:
    """The same while HIPS autograd traces it: the forward part of a gradient, less what starting a trace takes."""
    from autograd.core import VJPNode
    from autograd.tracer import trace

    def many(x: Any) -> Any:
        result = x
        for _ in range(count):
            result = operation(x)
        return result

    def measure() -> float:
        start = VJPNode.new_root()
        began = perf_counter()
        trace(start, many, plain_array)
        return (perf_counter() - began) / count

    return measure


def tracing(name: str) -> Operation:
    """The operation in autograd's own functions."""
    import autograd.numpy as anp

    return {
        "np.tanh(x)": anp.tanh,
        "x.sum()": anp.sum,
        "np.sum(x, axis=0)": lambda x: anp.sum(x, axis=0),
        "np.where(x > 0, x, 0.0)": lambda x: anp.where(x > 0, x, 0.0),
    }.get(name, OPERATIONS[name])


def computed(operation: Operation) -> Operation:
    return lambda x: operation(x).compute(scheduler="synchronous")


def compare(size: int, name: str, repetitions: int, least: float) -> dict[str, float]:
    """One operation at one size: the least microseconds of each of PEERS."""
    operation = OPERATIONS[name]
    bare = np.linspace(-1.0, 1.0, size)
    began = perf_counter()
    operation(bare)
    count = max(1, int(least / (perf_counter() - began + 20 * MICRO)))
    with rc.Cache():
        free = rc.array(bare)
    with rc.Cache(100 * size * 8 + 10**9):
        tight = rc.array(bare)
    measures: dict[str, Measure] = {
        "bare": timed(operation, bare, count),
        "wrapped": timed(operation, free, count),
        "within a budget": timed(operation, tight, count),
    }
    if find_spec("autograd"):
        measures["autograd"] = traced(tracing(name), bare, count)
    if find_spec("dask"):
        import dask.array as da

        lazy = da.from_array(bare, chunks=-1)
        few = max(1, count // 50)
        measures["dask, build"] = timed(operation, lazy, few)
        measures["dask, build and compute"] = timed(computed(operation), lazy, few)
    return {name: min(found) / MICRO for name, found in in_turns(measures, repetitions).items()}


Found = dict[str, dict[int, dict[str, float]]]
"""Operation -> elements -> who -> microseconds."""


def measure(quick: bool) -> Found:
    sizes = SIZES[::3] if quick else SIZES
    repetitions, least = (3, 0.002) if quick else (9, 0.05)
    found: Found = {}
    for name in OPERATIONS:
        say(name)
        found[name] = {size: compare(size, name, repetitions, least) for size in sizes}
    return found


def over(found: dict[str, float], who: str) -> str:
    return number(found[who] - found["bare"]) if who in found else NOT_INSTALLED


def times(found: dict[str, float], who: str) -> str:
    return number(found[who] / found["bare"]) if who in found else NOT_INSTALLED


def parts(found: Found) -> list[str]:
    """Of the page: microseconds over the bare operation for small arrays, then ratios for all sizes."""
    first = {name: sizes[SMALL] for name, sizes in found.items()}
    reached = [figures["wrapped"] - figures["bare"] for figures in first.values()]
    parts = [
        f"## Added to the bare operation, {SMALL} elements",
        f"Microseconds. A wrapped operation should add at most {TARGET:.0f}: "
        f"{sum(ratio <= TARGET for ratio in reached)} of {len(reached)} operations meet this target; "
        f"the smallest figure is {number(min(reached))}, the largest {number(max(reached))}.",
        markdown(
            ("operation", "bare", *(f"+ {who}" for who in PEERS), ""),
            [
                (f"`{name}`", number(figures["bare"]), *(over(figures, who) for who in PEERS), "")
                for name, figures in first.items()
            ],
        ),
        "## Multiples of the bare operation, by number of elements",
    ]
    for name, sizes in found.items():
        lines = [
            (f"{size:,}", f"{number(figures['bare'])} us", *(times(figures, who) for who in PEERS), "")
            for size, figures in sizes.items()
        ]
        parts += [f"`{name}`", markdown(("elements", "bare", *PEERS, ""), lines)]
    return parts


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0], into=None, quick=True).parse_args()
    machine = facts("autograd", "dask")
    found = measure(options.quick)
    text = page("The cost of wrapped arrays", __doc__, *parts(found), machine=machine)
    publish(options.into, "arrays", text, {"machine": machine, "microseconds": found})


if __name__ == "__main__":
    main()
