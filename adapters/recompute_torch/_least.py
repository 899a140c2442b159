"""`least`: what a training needs, told by one or two of its steps, before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from recompute import text
from recompute.planners import smallest
from recompute.simulator import baseline, simulate
from recompute.text import List, Table, format_bytes
from recompute.traces import read
from recompute_torch._block import budget as budget_block
from recompute_torch._holders import Parts
from recompute_torch._undo import Undo

_BEARABLE: Final = 3.0
"""The overhead above which a budget counts as too small."""

_CLOSE: Final = 0.04
"""Of the peak: the floor is found to within this."""

_POINTS: Final = 5


@dataclass(frozen=True)
class Least:
    """What some steps of a training need on one device, and what less memory than that would cost. Bytes."""

    device: str
    parts: Parts
    """What is in memory together at the tightest operator: nothing below their sum can work."""
    floor: int
    """The least budget within which the simulator finished the steps, in three times the compute or less."""
    peak: int
    """Without a limit."""
    curve: tuple[tuple[int, float], ...]
    """(budget, overhead): all compute over that without eviction, in the simulator."""

    def budget(self, between: float | str) -> int:
        """The bytes of a budget `between` the floor (0) and the peak (1): 0.4 or "40%" is 40 % of the way.

        Not a share of the peak, most of which would be below the floor. Raises ValueError for another number.
        """
        if between == 0:
            return self.floor
        share = 1.0 if between == 1 else text.bytes_or_share(between, "between")
        if isinstance(share, int):
            raise ValueError(f"between is 0 (the floor) to 1 (the peak), not {between!r}")
        return self.floor + int(share * (self.peak - self.floor))

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        pairs = [
            ("floor", f"{format_bytes(self.floor)}, {self.floor / max(1, self.peak):.0%} of the peak"),
            ("nothing below", f"{format_bytes(self.parts.total)}: {self.parts}"),
            ("peak", f"{format_bytes(self.peak)} without a limit"),
        ]
        rows = [
            (format_bytes(each), f"{each / max(1, self.peak):.0%}", f"{overhead:.2f}") for each, overhead in self.curve
        ]
        curve = List(("budget", "of the peak", "overhead"), rows, ">>>")
        return Table(f"what a step needs on {self.device}", pairs, [curve])


def least(step: Callable[[], Any], /, *, steps: int = 2, budget: Any = None) -> Least:
    """What a training needs: the least budget, the peak, and the cost of budgets between.

    Runs `step`, which takes one step of a training, and puts back what it has changed: parameters, buffers, gradients,
    optimizers, schedulers, scalers, and random numbers. What it does in Python besides, such as to draw from a data
    loader, stays done.

    Parameters
    ----------
    steps
        Two show what the optimizer remembers from the first step on; one is enough without such memory.
    budget
        As for `budget`, to try the steps in: by default they take what they take, and a copy of what they write.

    Raises what `step` raises, and BudgetError if the budget is too small.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps!r}")
    undo = Undo()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.jsonl"
        try:
            with budget_block(budget, trace=trace, foresight=False) as block:
                floor = block._measure()
                with undo:
                    for _ in range(steps):
                        step()
        finally:
            undo.back()
        program = read(trace)
    peaks = baseline(program)
    if not peaks or not floor.parts:
        raise ValueError("the step has made no tensors: give a function that takes one step of the training")
    device = max(peaks, key=lambda each: peaks[each])
    peak = peaks[device]

    def overhead(budget: int) -> float | None:
        return simulate(program, {device: budget}, limit=_BEARABLE, peak=peaks).overhead

    parts = floor.parts[device]
    lowest, cost = _smallest(overhead, parts.total, peak)
    curve = [(lowest, cost)]
    for number in range(1, _POINTS - 1):
        between = lowest + (peak - lowest) * number // (_POINTS - 1)
        costs = overhead(between) if between > lowest else None
        if costs is not None:
            curve.append((between, costs))
    if lowest < peak:
        curve.append((peak, 1.0))
    return Least(device, parts, lowest, peak, tuple(curve))


def _smallest(overhead: Callable[[int], float | None], low: int, high: int) -> tuple[int, float]:
    """The least budget that works, and what it costs, by bisection; the highest works, and costs nothing."""
    costs = {high: 1.0}

    def fits(budget: int) -> bool:
        found = overhead(budget)
        if found is not None:
            costs[budget] = found
        return found is not None

    best = low if fits(low) else smallest(fits, low, high, within=_CLOSE * high)
    return best, costs[best]
