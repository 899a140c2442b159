"""A plan in a file: made once, followed by every process that runs the same program."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jaxlib.version

from recompute.planners import PlanError
from recompute_jax._remat.recipe import Recipe

_HEADER: Final = "recompute remat plan"
_VERSION: Final = 3


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
    recipe: Recipe | None
    """None: the function is left as it is."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it. Raises OSError."""
        Path(path).write_text(json.dumps({_HEADER: _VERSION, **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SavedPlan:
        """What `save` wrote. Raises OSError, and PlanError if it is something else."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop(_HEADER) != _VERSION:
                raise ValueError("another version")
            recipe, loops = content.pop("recipe"), tuple(content.pop("loops"))
            return cls(recipe=recipe and Recipe.read(recipe), loops=loops, **content)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise PlanError(f"{os.fspath(path)} is not a file that a plan of remat was saved to") from None


def made_with(compiler_options: Mapping[str, Any]) -> str:
    """What compiled memory depends on beside the program."""
    options = sorted(f"{name}={value}" for name, value in compiler_options.items())
    return ", ".join(
        [f"jax {jax.__version__}", f"jaxlib {jaxlib.version.__version__}", jax.default_backend(), *options]
    )
