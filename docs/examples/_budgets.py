"""One program on plain arrays, on wrapped ones, and within several budgets: what each run takes, side by side."""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeVar

import recompute as rc
from _report import aligned, into_files, progress
from recompute.events import Event
from recompute.policies import PolicyName

POLICIES: Final[tuple[PolicyName, ...]] = ("needed", "lru")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one way of running a program took. Bytes, seconds."""

    budget: int | None = None
    policy: str = "not wrapped"
    seconds: float
    """Of all processors together: the best of several runs."""
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
    add(
        "--budget",
        type=_share,
        default=share,
        metavar="SHARE",
        help="share of the peak without a budget; default %(default)s",
    )
    add("--table", action="store_true", help="measure other budgets and another policy, too")
    add(
        "--repeats",
        type=_count,
        default=repeats,
        metavar="N",
        help="how many runs; the best time counts; default %(default)s",
    )
    return into_files(found, "what was in memory when")


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
    gc.collect()  # caches that have gone plan no more: what their threads allocate would count
    tracemalloc.start()
    try:
        yield found
    finally:
        found.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def compare(
    plain: Callable[[], T],
    wrapped: Callable[[int | None, PolicyName, list[Event] | None], T],
    share: float,
    others: Sequence[float] = (),
    patience: float = inf,
    events: list[Event] | None = None,
) -> list[T]:
    """On plain arrays, on wrapped ones without a budget, then within budgets; those that are too small are left out.

    A budget is a share of the peak without one: `share` for the default policy, `others` for all; a policy that took
    `patience` times as long as no budget gets no smaller one. `wrapped` gets the budget in bytes, the policy, and
    `events` to be filled if it is the run within `share`.
    """
    first = POLICIES[0], share
    jobs = {first, *((policy, other) for policy in POLICIES for other in others)}
    with progress(2 + len(jobs)) as advance:
        advance(1, "plain arrays")
        runs = [plain()]
        advance(1, "no budget")
        runs.append(free := wrapped(None, POLICIES[0], None))
        for policy, part in sorted(jobs, key=lambda job: (POLICIES.index(job[0]), -job[1])):
            advance(1, f"{policy}, {part:.0%}")
            if runs[-1].policy == policy and runs[-1].seconds > patience * free.seconds:
                continue
            try:
                runs.append(wrapped(int(part * free.peak), policy, events if (policy, part) == first else None))
            except rc.BudgetError as error:
                print(f"{policy}, {part:.0%}: {error}", file=sys.stderr)
    return runs


def table(
    runs: Sequence[Taken],
    memory: Sequence[int],
    same: Sequence[bool | None],
    names: tuple[str, str] = ("policy", "allocated"),
    places: int = 0,
) -> str:
    """The runs of `compare`, with the bytes that each took by another measure, in a column of the second name.

    `same`: whether each gave what the others gave, None if it need not; `places` behind the point of megabytes.
    """
    free = runs[1]
    columns = [names[0], "budget", "counted", names[1], "time", "recomputed", "compute", "bits"]
    rows = [
        [
            run.policy,
            "none" if run.budget is None else f"{run.budget / free.peak:.0%}",
            f"{run.peak / 1e6:.{places}f} MB" if run.peak else "",
            f"{taken / 1e6:.{places}f} MB",
            f"{run.seconds:.2f} s, x {run.seconds / free.seconds:.2f}",
            f"{run.recomputed:,}" if run.operations else "",
            f"{run.overhead:.2f}" if run.operations else "",
            "" if right is None else "the same" if right else "WRONG",
        ]
        for run, taken, right in zip(runs, memory, same, strict=True)
    ]
    return aligned(columns, rows)
