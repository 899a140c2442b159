"""What training takes within several budgets, how much of it fits into one, and what is in memory when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import recompute as rc
from _budgets import tracing
from _training_network import Digits
from _training_steps import Run, Settings, gradients, gradients_by_autograd, train
from recompute.events import Event, Performed
from recompute.pictures import memory, save


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
    with tracing() as found:
        function()
    return found[0]


def tabulate(
    digits: Digits, settings: Settings, shares: Sequence[float], told: Callable[[str], object]
) -> dict[str, Any]:
    """Memory, in the books of the cache and by tracemalloc, and time, for each budget; parameters compared.

    tracemalloc makes everything slower, so what it sees is a run of its own, of two steps, without foresight: a plan
    takes memory while it is made, and two steps are too few to follow one.
    """
    short = replace(settings, steps=2, foresight=False)
    rows: list[dict[str, Any]] = []
    runs: list[Run] = []

    def add(name: str, cached: bool, budget: int | None = None, derive: Callable[..., Any] = gradients) -> None:
        def make() -> rc.Cache | None:
            return settings.cache(budget) if cached else None

        def make_short() -> rc.Cache | None:
            return short.cache(budget) if cached else None

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
        row["traced"] = traced(lambda: train(digits, short, make_short(), derive=derive))
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
        row["traced"] = traced(partial(careful, digits, replace(larger, steps=2, foresight=False), budget))
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
    back = next(event for event in events if isinstance(event, Performed) and event.function == "cross_entropy_back")
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
