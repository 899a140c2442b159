"""The runs of a program as trees: below each run those that were repeated for it.

A cache tells runs in the order in which they end. Before an operation can run, what it takes and was evicted is
computed again, and before that what this takes: so the runs that end right before another one, and make what that
takes, were made for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recompute.events import Accessed, Detached, Event, Performed, Pinned


@dataclass(slots=True, eq=False)
class NestedRun:
    """One run of an operation, and the runs that were necessary for it."""

    event: Performed
    start: float
    """When the first of the runs below it began: before its own begin, if there are any."""
    needed: list[NestedRun] = field(default_factory=list)
    """In order of time."""
    asked: NestedRun | None = None
    """The run that it was necessary for."""
    why: str = ""
    """The step of the program that asked for it: "get", "pin" or "detach"."""
    depth: int = 0
    """0: the first run of an operation; 1: asked for by that, or by the program itself; and so on."""

    @property
    def own(self) -> float:
        """When the run itself began: all times are on the compute clock, so it takes its cost."""
        return self.event.time - self.event.cost


def trees(events: Iterable[Event]) -> dict[int, list[NestedRun]]:
    """Thread -> the runs that nothing else asked for, in order of time. O(events)."""
    by_thread: dict[int, list[NestedRun]] = {}
    closed: dict[int, int] = {}  # thread -> how many of its trees were asked for by the program
    for event in events:
        if isinstance(event, Performed):
            roots = by_thread.setdefault(event.thread, [])
            run = NestedRun(event, event.time - event.cost)
            wanted, least = set(event.inputs), closed.get(event.thread, 0)
            while len(roots) > least and roots[-1].event.again and not wanted.isdisjoint(roots[-1].event.results):
                below = roots.pop()
                below.asked = run
                run.needed.append(below)
                run.start = below.start
            run.needed.reverse()
            roots.append(run)
        elif isinstance(event, Accessed | Pinned | Detached):
            for thread, roots in by_thread.items():
                if roots and event.value in roots[-1].event.results:
                    closed[thread] = len(roots)
                    if roots[-1].event.again:
                        roots[-1].why = {Accessed: "get", Pinned: "pin", Detached: "detach"}[type(event)]
    for roots in by_thread.values():
        for run, _ in walk(roots):
            run.depth = int(run.event.again) if run.asked is None else run.asked.depth + 1
    return by_thread


def walk(roots: Iterable[NestedRun]) -> Iterator[tuple[NestedRun, bool]]:
    """Each run when it begins, before those below it, and then (True) when they have ended and it runs itself."""
    stack = [(run, False) for run in reversed(list(roots))]
    while stack:
        run, ready = stack.pop()
        yield run, ready
        if not ready:
            stack.append((run, True))
            stack.extend([(below, False) for below in reversed(run.needed)])
