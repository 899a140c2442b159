"""`recompute_jax.remat` on programs that other libraries write: right results, memory within the budget, planning time.

`python benchmarks/jax_others.py --into docs/results` writes jax-others.md there; `--programs "linen resnet,haiku"`
chooses. It needs flax, optax, equinox, diffrax, numpyro, blackjax, dm-haiku and orbax-checkpoint, and reports which of
them are missing. Each program is compiled by `jax.jit` ("plain"), then planned within a share of the temporaries that
plain needs. "Difference" is the largest difference in any result, as a share of the largest element of the same array.
For arrays whose elements are all below 1e-6 of the largest element of all results, it is a share of that largest
element. "Planning" is everything before the planned function is compiled: tracing, planning, and compilations that
check how much memory is needed.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import jax
import numpy as np
from _common import apart, arguments, facts, markdown, page, say, section, write
from _jax_other_programs import PROGRAMS, Program

import recompute as rc
from recompute_jax import remat

PACKAGES: Final = ("flax", "optax", "equinox", "diffrax", "numpyro", "blackjax", "dm-haiku", "orbax-checkpoint")
SMALL: Final = 1e-6  # of the largest element of all results: what is smaller may be rounding
SAME: Final = 2e-5  # of the largest element of each result


@dataclass
class Line:
    """What was found for one program."""

    name: str
    what: str
    equations: int
    plain: int
    compile_seconds: float
    share: float
    budget: int
    planning_seconds: float
    where: str
    """The array that differs most, or what the error says."""
    compiled: int = 0
    """Bytes; 0: nothing fits."""
    overhead: float = 0.0
    planned_compile_seconds: float = 0.0
    difference: float = float("inf")

    @property
    def is_right(self) -> bool:
        return self.difference <= SAME and self.compiled <= self.budget


def measure(program: Program) -> list[Line]:
    """One line for each share."""
    fn, args, options = program.fn, program.args, program.options
    jitted = jax.jit(fn, **options)
    started = perf_counter()
    compiled = jitted.lower(*args).compile()
    took = perf_counter() - started
    plain = compiled.memory_analysis().temp_size_in_bytes
    equations = _size(jax.make_jaxpr(fn, static_argnums=options.get("static_argnums", ()))(*args))
    expected = jitted(*map(_copied, args))
    line = partial(Line, program.name, program.what, equations, plain, took)
    found = []
    for share in program.shares:
        planned = remat(fn, of_peak=share, **options)
        started = perf_counter()
        try:
            plan = planned.plan(*args)
        except rc.BudgetError as error:
            say(f"  {program.name} at {share:.0%}: {error}")
            found.append(line(share, int(share * plain), planning_seconds=perf_counter() - started, where=str(error)))
            continue
        planning = perf_counter() - started
        started = perf_counter()
        again = planned.lower(*args).compile()
        compiling = perf_counter() - started
        size = again.memory_analysis().temp_size_in_bytes
        difference, where = compared(expected, planned(*map(_copied, args)))
        found.append(line(share, plan.budget, planning, where, size, plan.overhead, compiling, difference))
        say(
            f"  {program.name} at {share:.0%}: {size:,} of {plan.budget:,} bytes, overhead {plan.overhead:.3f}, "
            f"planned in {planning:.1f} s, compiled in {took:.1f} s, difference {difference:.1e} {where}"
        )
    return found


def compared(expected: Any, found: Any) -> tuple[float, str]:
    """The largest difference as a share of the largest element of the same array, and where it is."""
    worst, where = 0.0, ""
    whole = max((float(np.max(np.abs(array), initial=0.0)) for array in _floats(expected)), default=0.0)
    one, two = jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found)
    for (path, left), right in zip(one, two, strict=True):
        if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        if not np.array_equal(np.isfinite(left), np.isfinite(right)):
            return float("inf"), jax.tree_util.keystr(path)
        apart = float(np.max(np.abs(left - right), initial=0.0, where=np.isfinite(left)))
        scale = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left)))
        scale = scale if scale > SMALL * whole else whole
        relative = apart / scale if scale else apart
        if relative > worst:
            worst, where = relative, jax.tree_util.keystr(path)
    return worst, where


def _floats(tree: Any) -> list[Any]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if jax.numpy.issubdtype(leaf.dtype, np.inexact)]
    return [leaf[np.isfinite(leaf)] for leaf in leaves]


def zero_gradients() -> list[list[str]]:
    """The gradients of an nnx transformer that are all rounding: with jit, without jit, and planned."""
    program = PROGRAMS["nnx transformer"]()
    trees = [
        jax.jit(program.fn)(*program.args),
        program.fn(*program.args),
        remat(program.fn, of_peak=program.shares[0])(*program.args),
    ]
    whole = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(trees[0]))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(trees[0])]
    lines = []
    for path, plain, eager, planned in zip(paths, *map(jax.tree.leaves, trees), strict=True):
        largest = float(np.abs(plain).max())
        if largest < SMALL * whole:
            apart = [f"{float(np.abs(plain - other).max()) / largest:.1e}" for other in (eager, planned)]
            lines.append([f"`{path}`", f"{largest:.1e}", f"{largest / whole:.1e}", *apart])
    return lines


def cached_twice() -> list[list[str]]:
    """Seconds to plan and to compile in two processes with one persistent compilation cache."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": directory,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }  # for the processes that begin now: this one has read them
        return [[number, *apart(in_this_process)] for number in ("first", "second")]


def in_this_process() -> list[str]:
    """Seconds to plan and compile the haiku program, and the sum of its results."""
    program = PROGRAMS["haiku"]()
    planned = remat(program.fn, of_peak=program.shares[0])
    started = perf_counter()
    planned.plan(*program.args)
    planning = perf_counter() - started
    started = perf_counter()
    planned.lower(*program.args).compile()
    total = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(planned(*program.args)))
    return [f"{planning:.1f}", f"{perf_counter() - started:.1f}", f"{total:.9g}"]


def _size(closed: Any) -> int:
    from recompute_jax._program.jaxpr import flatten

    return len(flatten(closed).equations)


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def parts(lines: list[Line], missing: list[str], zeros: list[list[str]], cache: list[list[str]]) -> list[str]:
    """All of the page but the machine."""
    found = [f"Correct and within the budget: {sum(line.is_right for line in lines)} of {len(lines)}."]
    found.append(markdown(HEADER, [_cells(line) for line in lines]))
    names = dict.fromkeys((line.name, line.what) for line in lines)
    found += ["The programs:", "\n".join(f"* {name}: {what}" for name, what in names)]
    for line in lines:
        if not line.is_right:
            size = f", {line.compiled:,} of {line.budget:,} bytes" if line.compiled else ""
            found.append(f"Not met: {line.name} at {line.share:.0%}: {line.where}{size}.")
    if missing:
        found.append("Not measured: " + "; ".join(missing) + ".")
    if zeros:
        head = (
            "leaf | largest element | share of the largest gradient | difference without jit | difference when planned"
        )
        found.append(section("Gradients that are zero", ZEROS, head, zeros))
    if cache:
        head = "process | planning, s | compiling, s | sum of results"
        found.append(section("The persistent compilation cache", CACHE, head, cache))
    return found


HEADER: Final = (
    "program | equations | plain, MB | compile plain, s | budget | budget, MB | planned, MB | overhead | planning, s | "
    "compile planned, s | difference"
)


def _cells(line: Line) -> list[str]:
    fits = bool(line.compiled)
    return [
        line.name,
        f"{line.equations:,}",
        _mega(line.plain),
        f"{line.compile_seconds:.1f}",
        f"{line.share:.0%}",
        _mega(line.budget),
        _mega(line.compiled) if fits else "none fits",
        f"{line.overhead:.3f}" if fits else "",
        f"{line.planning_seconds:.1f}",
        f"{line.planned_compile_seconds:.1f}",
        f"{line.difference:.1e}" if fits else "",
    ]


ZEROS: Final = """\
Adding the same number to all scores of a softmax changes nothing, so the gradient with respect to the bias of the keys
of an attention layer is zero. In float32 only rounding errors are left, and these depend on the order of sums: they
differ between `jax.jit` and JAX without jit as much as between `jax.jit` and a plan. The table has every leaf of the
transformer's gradient that is below 1e-6 of the largest, with differences as shares of the leaf's own size."""
CACHE: Final = """\
Two processes run the same program, one after the other, with `jax_compilation_cache_dir` set. The cache also holds the
compilations that only check memory. A plan can also be saved; then there is no search at all."""


def _mega(size: int) -> str:
    return f"{size / 1e6:.2f}"


def main() -> None:
    parser = arguments(__doc__.split("\n", 1)[0], into=None)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, separated by commas")
    options = parser.parse_args()
    machine = facts("jax", "jaxlib", *PACKAGES)
    lines: list[Line] = []
    missing: list[str] = []
    zeros: list[list[str]] = []
    cache: list[list[str]] = []
    for name in options.programs.split(","):
        say(name)
        try:
            lines += measure(PROGRAMS[name]())
            if name == "nnx transformer":
                zeros = zero_gradients()
            if name == "haiku":
                cache = cached_twice()
        except ImportError as error:
            missing.append(f"{name} ({error.name} is not installed)")
        text = page("JAX: programs of other libraries", __doc__, *parts(lines, missing, zeros, cache), machine=machine)
        write(options.into, "jax-others", text)
    print(text)


if __name__ == "__main__":
    main()
