"""Plans are kept where JAX keeps what it compiles: other processes find them in `jax_compilation_cache_dir`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from jax.extend.core import ClosedJaxpr

from recompute import BudgetError
from recompute.planners import PlanError
from recompute_jax._program.fingerprint import fingerprint
from recompute_jax._program.jaxpr import flatten
from recompute_jax._remat.compile import Argument
from recompute_jax._remat.followed import follow_saved
from recompute_jax._remat.options import Options
from recompute_jax._remat.planned import Planned
from recompute_jax._remat.saved import SavedPlan, made_with


def stored(
    closed: ClosedJaxpr, name: str, options: Options, arguments: Sequence[Argument], make: Callable[[], Planned]
) -> Planned:
    """The plan that some process made of this program with these options; if there is none, what `make` gives."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    if not directory or "://" in directory or options.price is not None:
        return make()
    path = Path(directory) / f"recompute-plan-{_key(closed, options, arguments)}.json"
    try:
        return follow_saved(closed, name, SavedPlan.load(path), options, arguments)
    except (OSError, PlanError, BudgetError):
        made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=path.stem) as work:  # so that half a plan is never seen
            file = Path(work, path.name)
            made.report.save(file)
            os.replace(file, path)
    except OSError as error:
        warnings.warn(f"the plan of {name} could not be kept in {directory}: {error}", stacklevel=2)
    return made


def _key(closed: ClosedJaxpr, options: Options, arguments: Sequence[Argument]) -> str:
    """Of everything that the plan depends on."""
    parts = [
        fingerprint(flatten(closed, inline_custom=False)),
        made_with(options.platform, options.compiler_options),
        options.budget,
        options.share,
        options.gate,
        options.other,
        options.effort,
        options.compilations,
        options.seed,
        options.offload,
        list(arguments),
        jax.devices()[0].device_kind,
        os.environ.get("XLA_FLAGS"),
    ]
    return sha256(repr(parts).encode()).hexdigest()
