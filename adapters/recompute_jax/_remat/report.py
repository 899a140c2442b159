"""The results of planning: equations, a report of values that are kept and recomputed, and a file that says it all."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import jax
import jaxlib.version
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from recompute.events import Event
from recompute.planners import PlanError, ProgramPlan
from recompute.text import format_bytes
from recompute.traces import Program
from recompute_jax._program.jaxpr import short, where
from recompute_jax._program.segments import Segments
from recompute_jax._remat.recipe import Recipe

_HEADER: Final = "recompute remat plan"
_VERSION: Final = 4
_DIGEST: Final = "digest"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of the plan of a function for one signature of its arguments."""

    name: str
    budget: int
    """Bytes of compiled temporaries that are allowed."""
    of_peak: float | None
    """The budget as a share of `baseline`, if it was given so."""
    baseline: int | None
    """Bytes of temporaries of the plain function under jit; None: there was no need to compile it."""
    predicted: int
    """Bytes of temporaries by the planner's count."""
    compiled: int
    """Bytes of temporaries by XLA's count (`memory_analysis().temp_size_in_bytes`)."""
    flops: float
    """Of the function, by its equations."""
    extra_flops: float = 0.0
    overhead: float = 1.0
    """The cost of all runs divided by that of the function as it is."""
    loops: tuple[str, ...] = ()
    """What becomes of scans."""


@dataclass(frozen=True, kw_only=True)
class SavedPlan(Figures):
    """What a file says: everything about a plan that is not made anew from the program."""

    program: str
    """The fingerprint of the function."""
    made_with: str
    """Versions, platform and options, on which compiled memory depends."""
    recipe: Recipe | None = None
    """None: the function is left as it is."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it. Raises OSError."""
        content = asdict(self)
        whole = {_HEADER: _VERSION, **content, _DIGEST: _digest(content)}
        Path(path).write_text(json.dumps(whole) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SavedPlan:
        """What `save` wrote. Raises OSError, and PlanError if it is something else, or was changed."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop(_HEADER) != _VERSION:
                raise ValueError("another version")
            if content.pop(_DIGEST) != _digest(content):
                raise ValueError("changed")
            recipe, loops = content.pop("recipe"), tuple(content.pop("loops"))
            return cls(recipe=recipe and Recipe.read(recipe), loops=loops, **content)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise PlanError(
                f"{os.fspath(path)} is not a file that a plan of remat was saved to by this version, or was changed "
                "since: make and save the plan again"
            ) from None


def _digest(content: Mapping[str, Any]) -> str:
    """Of what a file says, as `asdict` or JSON has it."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def made_with(compiler_options: Mapping[str, Any]) -> str:
    """What compiled memory depends on beside the program."""
    options = sorted(f"{name}={value}" for name, value in compiler_options.items())
    return ", ".join(
        [f"jax {jax.__version__}", f"jaxlib {jaxlib.version.__version__}", jax.default_backend(), *options]
    )


_LINES: Final = 24
_LASTING: Final = 0.05  # of the runs: what stays for fewer is not called kept


@dataclass(frozen=True)
class Trial:
    """One compilation of one schedule."""

    what: str
    compiled: int
    """Bytes of temporaries that XLA needs for it."""
    seconds: float
    """Of tracing and compiling."""
    budget: int | None = None
    """Bytes that the planner was given; None: nothing was planned."""
    predicted: int | None = None
    """Bytes of temporaries that the plan needs by its own count."""
    overhead: float = 1.0
    flops: float = 0.0
    """By XLA's count, which takes what is in a loop once."""


@dataclass(frozen=True)
class Kept:
    """A value in memory between segments."""

    type: str
    nbytes: int
    made_by: str
    where: str
    """The line of the program that made it, where JAX knows it."""
    runs: int
    """How many times it is made."""

    def __str__(self) -> str:
        times = f", made {self.runs} times" if self.runs > 1 else ""
        where = f" from {self.where}" if self.where else ""
        return f"{self.type} ({format_bytes(self.nbytes)}) output of {self.made_by}{where}{times}"


@dataclass(frozen=True, repr=False, kw_only=True)
class RematPlan(Figures):
    """The plan of a function for one signature of its arguments; prints as a report."""

    kept: tuple[Kept, ...]
    """Values that are made once and stay for a while, in order of creation."""
    recomputed: tuple[Kept, ...]
    trials: tuple[Trial, ...]
    seconds: float
    """What tracing, planning and compiling took."""
    program: Program
    """The segments as a program; arguments and results take no memory in it."""
    saved: SavedPlan
    """What a file of it says."""
    devices: int = 1
    """Bytes are those of each of so many."""
    plan: ProgramPlan | None = None
    """The schedule of the segments; None: the function is left as it is, or the plan is from a file."""
    gate: str | None = None
    """None: outside of loops nothing is recomputed."""
    regions: int = 0

    @property
    def peak(self) -> int:
        """Bytes of compiled temporaries, by the name that the planners' plans have for it."""
        return self.compiled

    def events(self) -> list[Event]:
        """For `recompute.pictures.residency`. Raises ValueError if nothing is recomputed."""
        from recompute.pictures import plan_events

        if self.plan is None:
            why = "the plan is from a file" if self.regions else "the function is left as it is"
            raise ValueError(f"{why}: there is no schedule to draw")
        return plan_events(self.program, self.plan)

    def to_json(self) -> str:
        """The figures of the plan as a JSON object, without what is kept and recomputed."""
        names = [*Figures.__dataclass_fields__, "peak", "seconds", "devices", "gate", "regions"]
        return json.dumps({name: getattr(self, name) for name in names})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for `planned(fn, plan=path)`. Raises OSError."""
        self.saved.save(path)

    def __str__(self) -> str:
        baseline = "" if self.baseline is None else f", plain {format_bytes(self.baseline)}"
        share = "" if self.of_peak is None else f" ({self.of_peak:.0%} of the plain function's)"
        place = f" on each of {self.devices} devices" if self.devices > 1 else ""
        regions = "once each" if self.regions else "left as it is"
        if self.gate:
            regions = f"{self.regions} regions, gate {self.gate}"
        again = self.extra_flops / self.flops if self.flops else 0.0
        lines = [
            f"{self.name}: {len(self.program.calls)} segments, {regions}",
            f"temporaries{place}: budget {format_bytes(self.budget)}{share}, predicted {format_bytes(self.predicted)}, "
            f"compiled {format_bytes(self.compiled)}{baseline}",
            f"FLOPs: {self.flops:.4g}, and {self.extra_flops:.4g} again ({again:.1%})",
        ]
        lines += self.loops
        for title, values in (("kept", self.kept), ("recomputed", self.recomputed)):
            total = sum(value.nbytes for value in values)
            lines.append(f"{title}: {len(values)} values, {format_bytes(total)} together")
            kinds = Counter(values)
            for kind, count in [*kinds.items()][:_LINES]:
                lines.append(f"  {kind} [{count} of these]" if count > 1 else f"  {kind}")
            if len(kinds) > _LINES:
                lines.append(f"  ... and {len(kinds) - _LINES} kinds more")
        lines.append(f"compilations ({self.seconds:.1f} s in all):")
        for trial in self.trials:
            planned = "" if trial.predicted is None else f", predicted {format_bytes(trial.predicted)}"
            lines.append(
                f"  {trial.what}{planned}, compiled {format_bytes(trial.compiled)}, overhead {trial.overhead:.3f}, "
                f"{trial.seconds:.1f} s"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<remat plan of {self.name}: compiled temporaries {format_bytes(self.compiled)} of "
            f"{format_bytes(self.budget)}, overhead {self.overhead:.3f}>"
        )


def report_of(
    saved: SavedPlan, segments: Segments, sequence: Sequence[int], scale: float = 1.0, **more: Any
) -> RematPlan:
    """What is said of a plan of these segments in this order; `scale`: what one of several devices has of the bytes."""
    kept, recomputed = _described(segments, sequence, scale)
    recipe = saved.recipe
    about: dict[str, Any] = {name: getattr(saved, name) for name in Figures.__dataclass_fields__} | {
        "kept": kept,
        "recomputed": recomputed,
        "program": segments.program,
        "saved": saved,
        "gate": recipe.gate if recipe and len(recipe.regions) > 1 else None,
        "regions": len(recipe.regions) if recipe else 0,
    }
    return RematPlan(**(about | more))


def _described(segments: Segments, sequence: Sequence[int], scale: float) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """The values that stay long and are made once, and those that are made again. O(runs)."""
    runs = Counter(sequence)
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for place, number in enumerate(sequence):
        part = segments.segments[number]
        for var in part.inputs:
            last[var] = place
        for var in part.outputs:
            first.setdefault(var, place)
    kept: list[Kept] = []
    again: list[Kept] = []
    for number, part in enumerate(segments.segments):
        for var in part.outputs:
            size = segments.builder.nbytes(var)
            if not size:
                continue
            line = Kept(short(var.aval), int(scale * size), part.name, where(part.equations[-1]), runs[number])
            if runs[number] > 1:
                again.append(line)
            elif last.get(var, 0) - first[var] > _LASTING * len(sequence):
                kept.append(line)
    return tuple(kept), tuple(again)


@dataclass(frozen=True)
class PlannedProgram:
    """The plan, and the function that follows it; None: the function as it is."""

    report: RematPlan
    emitted: ClosedJaxpr | None

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        assert self.emitted is not None, "the function is left as it is"
        return list(jaxpr_as_fun(self.emitted)(*leaves))
