"""The loop over the steps of a program, which all replays share, and the figures of a run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from recompute._traces.program import Program, StepKind

Status = Literal["ok", "oom", "thrash"]


class Thrashing(Exception):
    """More recomputation than the limit allows."""


@dataclass(frozen=True)
class Counts:
    """The counts of a replay up to some moment, over all rounds. Times in units of the program."""

    model_time: float
    remat_time: float
    peak: int
    evictions: int
    rematerializations: int
    scored: int
    waited: float = 0.0
    """Time beyond the compute: transfers that stop it, or a link that is done later."""
    written: int = 0
    read: int = 0


@dataclass(frozen=True)
class Run:
    """One replay. Bytes, and seconds of compute; `seconds` is what the simulation itself took."""

    trace: str
    policy: str
    search: str
    release: str
    budget_bytes: int
    budget_ratio: float
    """Of `baseline_peak_bytes`."""
    status: Status
    """`oom`: something did not fit; `thrash`: more recomputation than the limit allows."""
    overhead: float | None
    """All compute divided by `model_time`; None unless the status is ok."""
    model_time: float
    total_time: float
    peak_bytes: int
    baseline_peak_bytes: int
    """Of a run without a budget."""
    evictions: int
    rematerializations: int
    candidates_scored: int
    seconds: float
    iteration: int = 1
    """Which round of a program that repeats."""
    moved_bytes: int = 0
    """Written to a tier."""
    fetched_bytes: int = 0
    """Read back from it."""
    waited_time: float = 0.0
    """Seconds that transfers take beyond the compute."""

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is looked for: the graph of a replay lives to its end."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class StepLoop:
    """Does the steps of a program, one after the other."""

    program: Program
    do: ClassVar[Mapping[StepKind, Callable[[Any, int], object]]]
    """Kind of a step -> the function that does it, not bound to a replay, which would then refer to itself."""
    short: ClassVar[type[Exception]]
    """Is raised when something does not fit."""

    def run(self, progress: Callable[[int], None] | None = None) -> Status:
        """Replay all steps; `progress(steps)` is told now and then how many are done."""
        do = self.do
        try:
            for number, (kind, which) in enumerate(self.program.steps):
                do[kind](self, which)
                if progress is not None and not number & 0xFF:
                    progress(number)
            for value in self.program.outputs:
                do["pin"](self, value)
        except self.short:
            return "oom"
        except Thrashing:
            return "thrash"
        return "ok"
