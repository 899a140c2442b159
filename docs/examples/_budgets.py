"""One program on plain arrays, on wrapped ones, and within several budgets: what each run takes, side by side."""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeVar

import recompute as rc
from _report import aligned, progress

POLICIES: Final = ("needed", "lru")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one way of running a program took. Bytes, seconds."""

    budget: int | None = None
    policy: str = "not wrapped"
    seconds: float
    """Of all processors together: the best of several runs."""
    traced: int
    """The most that was allocated at once, by tracemalloc: temporary arrays and recipes included."""
    peak: int = 0
    """The most that the cache counted."""
    overshoot: int = 0
    operations: int = 0
    recomputed: int = 0
    overhead: float = 1.0


T = TypeVar("T", bound=Taken)


def counted(stats: rc.Stats) -> dict[str, Any]:
    """Of `Taken`, what the cache knows."""
    return {
        "peak": stats.peak,
        "overshoot": stats.overshoot,
        "operations": stats.operations,
        "recomputed": stats.rematerializations,
        "overhead": stats.overhead,
    }


def parser(description: str, share: float, repeats: int) -> argparse.ArgumentParser:
    """Of a script that compares runs, with its defaults; it may have further options."""
    found = argparse.ArgumentParser(description=description)
    add = found.add_argument
    add("--budget", type=_share, default=share, metavar="SHARE", help="of the peak without a budget; %(default)s")
    add("--table", action="store_true", help="other budgets, and another policy, too")
    add("--repeats", type=_count, default=repeats, metavar="N", help="runs, of which the best time counts; %(default)s")
    add("--json", metavar="PATH", help="write the figures")
    add("--picture", metavar="PATH", help="draw what was in memory when: .png, .svg or .pdf")
    return found


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("the budget is a share, more than 0 and at most 1")
    return share


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("a time needs at least one run")
    return count


@contextmanager
def tracing() -> Iterator[list[int]]:
    """The most bytes allocated at once in the block, in a list that is filled at its end."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
    finally:
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def compare(
    plain: Callable[[], T],
    wrapped: Callable[[str, float | None, int | None], T],
    share: float,
    others: Sequence[float] = (),
    patience: float = inf,
) -> list[T]:
    """On plain arrays, on wrapped ones without a budget, then within budgets; those that are too small are left out.

    `wrapped` gets the policy, the share of the peak without a budget, and that in bytes. `share` is for the default
    policy, `others` for all; a policy that took `patience` times as long as no budget gets no smaller one.
    """
    jobs = {(POLICIES[0], share), *((policy, other) for policy in POLICIES for other in others)}
    with progress(2 + len(jobs)) as advance:
        advance(1, "plain arrays")
        runs = [plain()]
        advance(1, "no budget")
        runs.append(free := wrapped(POLICIES[0], None, None))
        for policy, part in sorted(jobs, key=lambda job: (POLICIES.index(job[0]), -job[1])):
            advance(1, f"{policy}, {part:.0%}")
            if runs[-1].policy == policy and runs[-1].seconds > patience * free.seconds:
                continue
            try:
                runs.append(wrapped(policy, part, int(part * free.peak)))
            except rc.BudgetError as error:
                print(f"{policy}, {part:.0%}: {error}", file=sys.stderr)
    return runs


def table(runs: Sequence[Taken], same: Sequence[bool], places: int = 0) -> str:
    """The runs of `compare`; `same`: whether each gave what the others gave; `places` behind the point of megabytes."""
    free = runs[1]
    columns = ["policy", "budget", "counted", "allocated", "time", "recomputed", "compute", "bits"]
    rows = [
        [
            each.policy,
            "none" if each.budget is None else f"{each.budget / free.peak:.0%}",
            f"{each.peak / 1e6:.{places}f} MB" if each.peak else "",
            f"{each.traced / 1e6:.{places}f} MB",
            f"{each.seconds:.2f} s, x {each.seconds / free.seconds:.2f}",
            f"{each.recomputed:,}" if each.operations else "",
            f"{each.overhead:.2f}" if each.operations else "",
            "the same" if right else "WRONG",
        ]
        for each, right in zip(runs, same, strict=True)
    ]
    return aligned(columns, rows)
