"""Candidates as schedules: in regions behind gates, and compiled for a look at the memory that XLA needs for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jax.extend.core import ClosedJaxpr

from recompute.text import format_bytes
from recompute_jax._emit.gates import Gate
from recompute_jax._emit.regions import Region, updates_apart
from recompute_jax._program.costs import nbytes, size_of
from recompute_jax._program.jaxpr import lifted
from recompute_jax._remat.candidates import Candidate
from recompute_jax._remat.compile import Argument, Compilations
from recompute_jax._remat.options import Options
from recompute_jax._remat.recipe import Recipe
from recompute_jax._remat.report import Trial

_QUICK: Final = 1_500  # equations that compile soon enough to be tried in another way, too


@dataclass(frozen=True)
class Schedule:
    """A candidate that was compiled."""

    trial: Trial
    candidate: Candidate
    regions: list[Region]
    emitted: ClosedJaxpr
    gate: Gate
    length: int
    """Segments in a region, at most."""

    @property
    def is_quick(self) -> bool:
        """Whether compiling it takes little."""
        return size_of(self.emitted.jaxpr) <= _QUICK

    @property
    def recipe(self) -> Recipe:
        """What makes it again."""
        return self.candidate.recipe(self.regions, self.gate)

    @property
    def loops(self) -> tuple[str, ...]:
        """What becomes of loops, and what moves."""
        return self.candidate.looped.texts + self.candidate.fitted.texts + _about_moves(self.candidate)


class Schedules:
    """The schedules of one function that were looked at."""

    def __init__(self, closed: ClosedJaxpr, options: Options, arguments: Sequence[Argument]) -> None:
        self._closed = closed
        self._options = options
        self._arguments = arguments
        self._compilations = Compilations()
        self.donated = sum(
            nbytes(var.aval) for var, each in zip(closed.jaxpr.invars, arguments, strict=True) if each.donated
        )
        """Bytes of arguments."""
        self.scale = 1.0
        """What one of several devices has of the bytes of all."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All compilations, in order."""
        return tuple(self._compilations.trials)

    def compile(self, candidate: Candidate, given: int, length: int, what: str, gate: Gate | None = None) -> Schedule:
        """In regions of so many segments, within the bytes given."""
        gate = gate or self._options.first_gate
        steps = candidate.regions(int(given / self.scale), length)
        if self.donated and gate == "branch" and len(steps) > 1:
            steps = updates_apart(candidate.segments, steps)
        emitted = candidate.emitted(steps, gate)
        what = f"{what}, {len(steps)} regions" if len(steps) > 1 else what
        trial = self._compilations.compile(
            emitted,
            self._arguments,
            what,
            self._options.flags,
            given,
            predicted=int(self.scale * candidate.plan.peak),
            overhead=candidate.overhead,
            constants=candidate.looped.constants,
        )
        return Schedule(trial, candidate, steps, emitted, gate, length)

    def plain(self, what: str, compiler_options: Mapping[str, Any]) -> int:
        """Bytes of temporaries of the function as it is."""
        closed = self._closed
        return self._compilations.compile(
            lifted(closed), self._arguments, what, compiler_options, constants=closed.consts
        ).compiled


def _about_moves(candidate: Candidate) -> tuple[str, ...]:
    if not candidate.moved:
        return ()
    made = [var for number in candidate.moved for var in candidate.segments.segments[number].outputs]
    return (f"{len(made)} values ({format_bytes(sum(nbytes(var.aval) for var in made))}) move to the host and back",)
