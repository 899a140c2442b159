"""What was found for each model, the goals, and the page that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from _common import section

WITHIN: Final = 1.1  # of the budget
SAME: Final = 2e-6  # of the largest element
SLOWER: Final = 1.02
ALIKE: Final = 1.001  # FLOPs that differ by less are the same


@dataclass
class Found:
    """One way to compile a model."""

    name: str
    temporaries: float
    """MB."""
    gflop: float
    compile_seconds: float = 0.0
    """To trace, lower and compile, without planning."""
    plan_seconds: float = 0.0
    """To plan, and to compile schedules for a look at their memory."""
    compilations: int = 0
    """For a look."""
    seconds: list[float] = field(default_factory=list)
    """Of each round."""
    processor: list[float] = field(default_factory=list)
    """Seconds of all processors in each round."""
    budget: float = 0.0
    """MB."""
    difference: float = 0.0
    """From plain jit, of the largest element."""

    @property
    def milliseconds(self) -> float:
        return median(self.seconds) * 1e3

    def times(self, other: Found) -> float:
        """How many times the other's time it takes."""
        return median([one / two for one, two in zip(self.seconds, other.seconds, strict=True)])

    def work(self, other: Found) -> float:
        """How many times the other's processor time it takes."""
        return median([one / two for one, two in zip(self.processor, other.processor, strict=True)])


@dataclass
class Result:
    """What was found for one model."""

    model: str
    what: str
    equations: int
    plain: Found
    again: Found
    """Plain jit once more: the noise."""
    planned: list[Found] = field(default_factory=list)
    refused: list[tuple[float, str]] = field(default_factory=list)
    checkpoints: list[Found] = field(default_factory=list)
    """Those that no other beats in memory and FLOPs."""
    tried: int = 0

    @property
    def noise(self) -> float:
        return max(abs(self.again.times(self.plain) - 1), abs(self.plain.times(self.again) - 1))

    def best_within(self, megabytes: float) -> Found | None:
        """The fastest checkpoint configuration that fits."""
        fitting = [checkpoint for checkpoint in self.checkpoints if checkpoint.temporaries <= megabytes * 1.0001]
        return min(fitting, key=lambda configuration: configuration.times(self.plain), default=None)


def parts(results: Sequence[Result]) -> list[str]:
    """All of the page but the machine."""
    found = ["\n".join(goals(results))]
    for result in results:
        plain = result.plain
        what = (
            f"{result.equations:,} equations; plain jit: {plain.temporaries:.1f} MB, {plain.gflop:.2f} GFLOP, "
            f"{plain.milliseconds:.1f} ms, compiled in {plain.compile_seconds:.1f} s; timed again "
            f"{result.again.milliseconds:.1f} ms; {len(plain.seconds)} rounds. {result.tried} configurations of "
            'jax.checkpoint were compiled; "best checkpoint" is the fastest that needs no more memory than the budget. '
            "The last columns are GFLOP and time of remat divided by those of the best checkpoint."
        )
        title = f"{result.what[0].upper()}{result.what[1:]}"
        found.append(section(title, what, _HEADER, [_row(result, one) for one in result.planned]))
        found += [f"Refused, {megabytes:.1f} MB: {error}" for megabytes, error in result.refused]
    return found


_HEADER: Final = (
    "budget | MB | compiled MB | GFLOP | ms | plan + compile s | difference | best checkpoint | MB | GFLOP | ms | "
    "GFLOP ratio | time ratio | CPU time ratio"
)


def _row(result: Result, found: Found) -> tuple[str, ...]:
    row = (
        found.name,
        f"{found.budget:.1f}",
        f"{found.temporaries:.1f}",
        f"{found.gflop:.2f}",
        f"{found.milliseconds:.1f}",
        f"{found.plan_seconds:.1f} + {found.compile_seconds:.1f}",
        f"{found.difference:.1e}",
    )
    best = result.best_within(found.budget)
    if best is None:
        return (*row, "none fits", "", "", "", "", "", "")
    ratios = f"{found.gflop / best.gflop:.3f}", f"{found.times(best):.2f}", f"{found.work(best):.2f}"
    return (*row, best.name, f"{best.temporaries:.1f}", f"{best.gflop:.2f}", f"{best.milliseconds:.1f}", *ratios)


def goals(results: Sequence[Result]) -> list[str]:
    """Each goal with what met it and what did not."""
    every = [(result, found) for result in results for found in result.planned]
    within = [found.temporaries <= WITHIN * found.budget for _, found in every]
    refused = [f"{result.model} at {size:.1f} MB (refused)" for result in results for size, _ in result.refused]
    over = [_at(result, found) for (result, found), fits in zip(every, within, strict=True) if not fits] + refused
    less = [(result, found) for result, found in every if found.name != "100%"]
    rivalled = [
        (result, found, best) for result, found in less if (best := result.best_within(found.budget)) is not None
    ]
    alone = [_at(result, found) for result, found in less if result.best_within(found.budget) is None]
    beaten = [
        f"{_at(result, found)}: {found.gflop / best.gflop:.3f} of the FLOPs, {found.times(best):.2f} of the time and "
        f"{found.work(best):.2f} of the CPU time of {best.name}{_noise(result)}"
        for result, found, best in rivalled
        if found.gflop > best.gflop * ALIKE or found.times(best) > 1
    ]
    whole = [(found.times(result.plain), result) for result, found in every if found.name == "100%"]
    worst = max((found.difference for _, found in every), default=0.0)
    return [
        "## Goals\n",
        f"* Compiled temporaries at most {WITHIN} times the budget: {sum(within)} of {len(every) + len(refused)}."
        + (f" Missed: {'; '.join(over)}." if over else ""),
        "* No more FLOPs (within 0.1 %) and no more time than the best checkpoint that fits: "
        f"{len(rivalled) - len(beaten)} of {len(rivalled)}." + (f" Missed: {'; '.join(beaten)}." if beaten else ""),
        "* Each condition by itself: no more FLOPs in "
        f"{sum(found.gflop <= best.gflop * ALIKE for _, found, best in rivalled)} of {len(rivalled)}, no more CPU time "
        f"in {sum(found.work(best) <= 1 for _, found, best in rivalled)}, no more time in "
        f"{sum(found.times(best) <= 1 for _, found, best in rivalled)}.",
        f"* Budgets in which no configuration of jax.checkpoint fits: {len(alone)} ({'; '.join(alone) or 'none'}).",
        f"* Largest difference from plain jit: {worst:.1e} of the largest element; the goal is at most {SAME:.0e}.",
        "* With a budget of 100 % the program is the same as with plain jit, so times differ only by noise; the goal "
        f"is at most {SLOWER} times: "
        + "; ".join(
            f"{result.model} {ratio:.3f}, plain jit against itself {result.again.times(result.plain):.3f}"
            for ratio, result in whole
        )
        + ".",
        *_compilation(less),
    ]


def _compilation(less: Sequence[tuple[Result, Found]]) -> list[str]:
    """How much longer than twice the plain function's compilation."""
    if not less:
        return []
    final, one = max((found.compile_seconds - 2 * result.plain.compile_seconds, result.model) for result, found in less)
    plans = [(found.plan_seconds - 2 * result.plain.compile_seconds, result.model) for result, found in less]
    most, two = max(plans)
    longest = max(found.plan_seconds for _, found in less)
    return [
        "* Tracing, lowering and compiling the planned function took at most twice as long as for the plain one, plus "
        f"{max(final, 0.0):.1f} s ({one}). Before that, once per signature, come planning and up to "
        f"{max(found.compilations for _, found in less)} compilations to check memory. These took at most twice as "
        f"long as compiling the plain function plus {max(most, 0.0):.1f} s ({two}), and never more than "
        f"{longest:.0f} s."
    ]


def _at(result: Result, found: Found) -> str:
    return f"{result.model} at {found.name}"


def _noise(result: Result) -> str:
    return f" (noise {result.noise:.3f})"
