"""Ways to remember what was computed, each in a process of its own: chains read backwards, and what a way takes."""

from __future__ import annotations

import resource
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final, TypeVar

from _common import apart, say

import recompute as rc

T = TypeVar("T")

counts: Final[Counter[str]] = Counter()
"""Of this process: bytes written to "files", and how often something was "computed"."""


@dataclass(frozen=True)
class Taken:
    """What a way took. Seconds, of all processors for `processor`, and bytes."""

    seconds: float
    processor: float
    memory: int
    """By which the process grew at most."""
    files: int
    computed: int
    result: Any

    @property
    def times(self) -> tuple[str, str, str]:
        """Time of all processors, time, and memory, for a table."""
        return f"{self.processor:.1f} s", f"{self.seconds:.1f} s", f"{self.memory / 1e6:,.0f} MB"

    @property
    def written(self) -> str:
        """The bytes in files, for a table."""
        return f"{self.files / 1e6:,.0f} MB" if self.files else ""


def taken(work: Callable[[], Any]) -> Taken:
    """Do it in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = perf_counter(), process_time()
    result = work()
    seconds, processor = perf_counter() - start, process_time() - busy
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return Taken(seconds, processor, memory, counts["files"], counts["computed"], result)


def fastest(work: Callable[[], T], around: Callable[[], Any], times: int) -> tuple[float, T, Any]:
    """The fastest of some runs, each in a context of its own: seconds, its result, and what a cache there did."""
    best: tuple[float, T, Any] | None = None
    for _ in range(times):
        with around() as cache:
            start = perf_counter()
            result = work()
            seconds = perf_counter() - start
            stats = None if cache is None else cache.stats()
        if best is None or seconds < best[0]:
            best = seconds, result, stats
        del cache
    assert best is not None
    return best


def all_ways(ways: Mapping[str, Any], measure: Callable[[str], Taken]) -> dict[str, Taken]:
    """Each way by its name, in a process of its own; all have the same result."""
    found = {}
    for way in ways:
        found[way] = apart(measure, way)
        say(f"{way}: {found[way]}")
    assert len({one.result for one in found.values()}) == 1, "the ways differ"
    return found


def note_files(folder: str) -> None:
    """Count what is in a folder."""
    counts["files"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


@dataclass(frozen=True)
class Chain:
    """Values, each made of the one before by `step(value, number)`, and then read from the last to the first."""

    start: Any
    length: int
    step: Callable[[Any, int], Any]
    read: Callable[[Callable[[int], Any]], Any]
    """Asks `get(number)` once for what each step has made, backwards."""

    def kept(self) -> Any:
        """A list."""
        values = [self.start]
        for number in range(self.length):
            values.append(self.step(values[-1], number))
        return self.read(lambda _: values.pop())

    def by_hand(self, every: int) -> Any:
        """Every n-th value kept by hand, the others computed again a segment at a time (Chen et al., 2016)."""
        marks, value = {}, self.start
        for number in range(self.length):
            if number % every == 0:
                marks[number] = value
            value = self.step(value, number)
        segment: list[Any] = []

        def get(number: int) -> Any:
            if not segment:
                first = number - number % every
                value = marks.pop(first)
                for again in range(first, number + 1):
                    value = self.step(value, again)
                    segment.append(value)
            return segment.pop()

        return self.read(get)

    def in_files(self) -> Any:
        """`joblib.Memory`: every value in a file."""
        from joblib import Memory

        with tempfile.TemporaryDirectory() as folder:
            stored = Memory(folder, verbose=0).cache(self.step)
            references, value = [], self.start
            for number in range(self.length):
                references.append(stored.call_and_shelve(value, number))
                value = references[-1].get()
            found = self.read(lambda _: references.pop().get())
            note_files(folder)
            return found

    def cached(self, budget: int, nbytes: Callable[[int], int | None] = lambda _: None) -> tuple[Any, rc.Stats]:
        """`rc.Cache`; `nbytes`: of what each step makes, where that is said."""
        with rc.Cache(budget) as cache:
            values = [rc.pure(self.start)]
            for number in range(self.length):
                values.append(rc.ap(self.step, values[-1], number, nbytes=nbytes(number)))
            return self.read(lambda _: values.pop().get()), cache.stats()
