"""A plan: the straight line of operations to run and storages to free."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, runtime_checkable

Action = tuple[Literal["compute", "free", "fetch"], int]
"""Run an operation (the number of a call), free a storage, or bring all results of an operation from a tier."""

_HEADER: Final = "recompute plan"
_FIELDS: Final[dict[str, tuple[type, ...]]] = {
    "program": (str,),
    "method": (str,),
    "budget": (int,),
    "peak": (int,),
    "overhead": (int, float),
    "bound": (int, float, type(None)),
    "seconds": (int, float),
    "note": (str,),
    "tier": (str,),
}
"""Fields of the first line of a plan, and their types."""


class PlanError(ValueError):
    """There is no such plan, or a plan that does not do what it should: one line that says why."""


@runtime_checkable
class Plan(Protocol):
    """Every plan, whatever it is a plan of; `str(plan)` is a report for people."""

    @property
    def budget(self) -> int | None:
        """Bytes that it was made for; None: without a limit."""

    @property
    def peak(self) -> int | None:
        """Bytes at the worst moment; None: not known yet."""

    @property
    def overhead(self) -> float:
        """The cost of all that runs, divided by the cost of each operation once."""

    def to_json(self) -> str:
        """These figures, and what else describes the plan, as one JSON object."""


@dataclass(frozen=True, repr=False)
class ProgramPlan:
    """A schedule of one program under one budget."""

    program: str
    """The program's name."""
    method: str
    budget: int
    """Bytes, the program's sources included."""
    steps: tuple[Action, ...]
    peak: int
    """Bytes in use at the worst moment, the sources included."""
    overhead: float
    """The cost of all runs, and of transfers, divided by the cost of each operation once."""
    bound: float | None = None
    """The method proved that none of its plans under this budget has a smaller overhead. None: it proved nothing.

    For Revolve's that is any plan, for Checkmate's those in which stages run each operation at most once, in order.
    """
    seconds: float = field(default=0.0, compare=False)
    """Of planning."""
    note: str = ""
    """Remarks of the method."""
    tier: str = ""
    """The tier that results are fetched from: "12GB/s"; empty: none."""

    @property
    def is_optimal(self) -> bool:
        """The overhead is the least there is, and that is proved."""
        return self.bound is not None and self.overhead <= self.bound * (1 + 1e-9)

    @property
    def order(self) -> list[int]:
        """Numbers of calls of the program, in the order of their runs."""
        return [number for kind, number in self.steps if kind == "compute"]

    @property
    def computes(self) -> int:
        """How many times an operation is run."""
        return len(self.order)

    @property
    def fetches(self) -> int:
        """How many times the results of an operation are fetched."""
        return sum(kind == "fetch" for kind, _ in self.steps)

    def __repr__(self) -> str:
        proved = ", optimal" if self.is_optimal else f", at least {self.bound:.4f}" if self.bound is not None else ""
        return (
            f"<plan of {self.program} by {self.method}: overhead {self.overhead:.4f}{proved}, "
            f"peak {self.peak:,} of {self.budget:,} bytes, {self.computes:,} runs"
            + (f", {self.fetches:,} fetches>" if self.tier else ">")
        )

    def to_json(self) -> str:
        """The plan without its steps, as one JSON object."""
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__ if name != "steps"})

    def to_lines(self) -> Iterator[str]:
        """JSON lines: what the plan is, then one line a step."""
        yield json.dumps({_HEADER: 1, **json.loads(self.to_json())})
        for kind, which in self.steps:
            yield json.dumps({kind: which})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for `load`. Raises OSError."""
        Path(path).write_text("".join(f"{line}\n" for line in self.to_lines()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProgramPlan:
        """The plan that `save` wrote. Raises OSError, and PlanError with the line that is wrong.

        Whether it is a plan of some program is for `verify` to say.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise PlanError(f"{os.fspath(path)} is no text, and so no plan") from None
        try:
            return cls.from_lines(lines)
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> ProgramPlan:
        """The plan that `to_lines` wrote. Raises PlanError, with the number of the line that is wrong."""
        about: dict[str, Any] | None = None
        steps: list[Action] = []
        number = 0
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                if about is None:
                    if line.pop(_HEADER) != 1:
                        raise ValueError("not a plan of this version")
                    about = dict(line)
                    continue
                ((kind, which),) = line.items()
                if kind not in ("compute", "free", "fetch") or type(which) is not int:
                    raise ValueError("not a step")
                steps.append((kind, which))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise PlanError(f"line {number} is not a line of a plan: {text.strip()[:40]!r}") from None
        with suppress(TypeError):  # something is missing, or there is more
            if about is not None and all(type(value) in _FIELDS.get(name, ()) for name, value in about.items()):
                return cls(steps=tuple(steps), **about)
        raise PlanError(f"line {min(1, number)} does not say what the plan is; is this a file of a plan?")
