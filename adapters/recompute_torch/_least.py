"""`least`: what a training needs, told by one or two of its steps, before it begins; and how they are undone.

Tensors are copied before the first operator writes to them. Parameters, optimizers, schedulers, scalers and generators
of random numbers are found and noted down beforehand.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recompute import text
from recompute.planners import smallest
from recompute.simulator import baseline, simulate
from recompute.text import List, Table, format_bytes
from recompute.traces import read
from recompute_torch._block import budget as budget_block
from recompute_torch._holders import Parts
from recompute_torch._memory import copy, quietly
from recompute_torch._native.block import NativeBudget
from recompute_torch._recipe import storages, tensors
from recompute_torch._rules import Rule, rule_of


class Undo(TorchDispatchMode):
    """Inside the block the content of tensors is kept before it is written; `back` is called after it, each time."""

    def __init__(self) -> None:
        super().__init__()
        self._rules: dict[Any, Rule] = {}
        self._made: WeakValueDictionary[int, Any] = WeakValueDictionary()  # storages made inside, by identity
        self._before: dict[int, tuple[Any, Any]] = {}  # storages from outside that were written, and what was there
        self._copied = 0  # bytes of these copies so far
        self._steps = [*_generators(), *_objects()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = rule_of(func)
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if rule.what in ("writes", "other", "reshapes") or rule.hidden:
            written = [kwargs.get(place) if isinstance(place, str) else args[place] for place in rule.written]
            written += [args[place] for place in rule.hidden]
            for storage in storages(written if rule.what != "reshapes" else given):
                self._keep(storage)
        result = func(*args, **kwargs)
        taken = {id(storage) for storage in storages(list(tensors(given)))}
        for storage in storages(result):
            if id(storage) not in taken and id(storage) not in self._before:
                self._made[id(storage)] = storage
        return result

    def _keep(self, storage: Any) -> None:
        if id(storage) not in self._made and id(storage) not in self._before:
            self._before[id(storage)] = storage, copy(storage)
            self._copied += storage.nbytes()

    def run(self, block: Any, step: Callable[[], Any], steps: int, ask: Callable[[int], Any] = int) -> tuple[Any, int]:
        """Take steps in a budget block, and undo them; what `ask` says at their end, and what it is told.

        That is how many bytes were copied in this block.
        """
        before = self._copied
        try:
            with block:
                with self:
                    for _ in range(steps):
                        step()
                copied = self._copied - before
                return ask(copied), copied
        finally:
            self.back()

    def back(self) -> None:
        """All is as it was before the first block."""
        for storage, content in self._before.values():
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            quietly(partial(storage.copy_, content))
        for step in self._steps:
            step()


def _generators() -> list[Callable[[], Any]]:
    """How to put generators of random numbers back."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += list(torch.cuda.default_generators)
    steps: list[Callable[[], Any]] = [partial(generator.set_state, generator.get_state()) for generator in generators]
    steps.append(partial(random.setstate, random.getstate()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        steps.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return steps


def _objects() -> list[Callable[[], Any]]:
    """How to put gradients, and what else is no tensor that an operator writes, back to what they are now."""
    steps: list[Callable[[], Any]] = []
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    for thing in gc.get_objects():
        cls = type(thing)
        if issubclass(cls, torch.nn.Parameter):
            steps.append(partial(setattr, thing, "grad", thing.grad))
        elif issubclass(cls, kinds):
            steps.append(_noted(vars(thing)))
    return steps


def _noted(value: Any) -> Callable[[], Any]:
    """How to get a value as it is now: dicts and lists are the same objects, with what is in them now."""
    if isinstance(value, dict):
        items = {key: _noted(item) for key, item in value.items()}
        return partial(_refill, value, lambda: {key: item() for key, item in items.items()})
    if isinstance(value, list):
        parts = [_noted(part) for part in value]
        return partial(_refill, value, lambda: [part() for part in parts])
    return lambda: value


def _refill(container: Any, content: Callable[[], Any]) -> Any:
    items = content()
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(items)
    return container


_MAX_OVERHEAD: Final = 3.0
"""The overhead above which a budget counts as too small."""

_FLOOR_ERROR: Final = 0.04
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
            (format_bytes(budget), f"{budget / max(1, self.peak):.0%}", f"{overhead:.2f}")
            for budget, overhead in self.curve
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
        Two show what the optimizer remembers from the first step on; one is enough without such memory. Where blocks
        run below Python, as many follow there, for what kernels take while they run.
    budget
        As for `budget`, to try the steps in: by default they take what they take, and a copy of what they write.

    Raises what `step` raises, and BudgetError if the budget is too small.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps!r}")
    undo = Undo()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "steps.jsonl"
        block = budget_block(budget, trace=trace, foresight=False)
        floor = block._measure()
        undo.run(block, step, steps)
        program = read(trace)
    peaks = baseline(program)
    if not peaks or not floor.parts:
        raise ValueError("the step has made no tensors: give a function that takes one step of the training")
    device = max(peaks, key=lambda device: peaks[device])
    peak = peaks[device]

    def overhead(budget: int) -> float | None:
        return simulate(program, {device: budget}, limit=_MAX_OVERHEAD, peak=peaks).overhead

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
    below = budget_block(budget)
    if device == "cpu" and isinstance(below, NativeBudget):  # that counts what kernels have for a while, too

        def needs(copied: int) -> Parts:
            return below.needed(copied) if below.path == "native" else parts  # another one may be open by now

        needed, copied = undo.run(below, step, steps, needs)
        more = max(0, needed.total - parts.total)
        parts = max(parts, needed, key=attrgetter("total"))
        peak = peak + more if below.stats().evictions else max(parts.total, below.stats().peak - copied)
        lowest, curve = min(lowest + more, peak), [(min(size + more, peak), costs) for size, costs in curve]
    return Least(device, parts, lowest, peak, tuple(curve))


def _smallest(overhead: Callable[[int], float | None], low: int, high: int) -> tuple[int, float]:
    """The least budget that works, and what it costs, by bisection; the highest works, and costs nothing."""
    costs = {high: 1.0}

    def fits(budget: int) -> bool:
        cost = overhead(budget)
        if cost is not None:
            costs[budget] = cost
        return cost is not None

    best = low if fits(low) else smallest(fits, low, high, within=_FLOOR_ERROR * high)
    return best, costs[best]
