"""Everything that needs a GPU, in one command: tests, random array programs, applications, the cost of a step.

    python benchmarks/cupy_device.py                # writes docs/results/cupy.md and cupy.json
    python benchmarks/cupy_device.py --quick        # checks that it runs; prints, writes nothing (or --into FOLDER)

Measures one training step of a deep network, forward and backward by hand: seconds (the median of several, synchronized
with the device), the peak of bytes in use by CuPy's pool, evictions and recomputations; within budgets, and without a
budget but with the allocator that asks the cache for room. The baseline is the same code on plain arrays. Without a GPU
it says so, writes nothing, and the exit status is 2; it is 1 if a test or an application failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
from _common import facts, markdown, number, plain, say

import recompute as rc

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "docs" / "results"
SHARES: Final = (1.0, 0.75, 0.5, 0.4, 0.3)
LIBRARY: Final = "ARRAY_LIBRARY"
"""In the environment: the library whose arrays the tests in tests/arrays use."""

HEAD: Final = """# CuPy on a GPU

Made by `python benchmarks/cupy_device.py` on the device named below. Compare the ratios, which were taken in one run.

"""


@dataclass(frozen=True)
class Check:
    """Something that passes or fails."""

    name: str
    passed: bool
    said: str


@dataclass(frozen=True)
class Step:
    """One way to run the step of training."""

    name: str
    limit: int | None
    seconds: float
    peak: int
    evictions: int
    recomputations: int
    same: bool


# What passes or fails


def run(name: str, command: Sequence[str], **environment: str) -> Check:
    """A program of its own; what it said last."""
    say(name)
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "adapters"), os.environ.get("PYTHONPATH")]))
    made = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in (made.stdout + made.stderr).splitlines() if line.strip()]
    return Check(name, made.returncode == 0, lines[-1].strip(" =") if lines else "")


def checks(quick: bool) -> list[Check]:
    """The adapter's tests with the conformance kit, the tests of arrays, and the applications that know CuPy."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = sorted(path.as_posix() for path in (ROOT / "tests" / "adapters").glob("test_cupy*.py"))
    found = [run("conformance kit and tests of the adapter", [*pytest, *tests])]
    arrays = ROOT / "tests" / "arrays"
    if any(LIBRARY in path.read_text(encoding="utf-8") for path in arrays.glob("*.py")):
        found.append(run("tests of arrays", [*pytest, str(arrays)], **{LIBRARY: "cupy"}))
    found.append(programs(20 if quick else 200))
    for path in sorted((ROOT / "docs" / "examples").glob("*.py")):
        if "--library" in path.read_text(encoding="utf-8"):
            found.append(run(f"docs/examples/{path.name} --library cupy", [str(path), "--library", "cupy"]))
    return found


def programs(count: int) -> Check:
    """Random array programs on wrapped arrays, with half of them evicted after every line, and on plain ones."""
    sys.path.append(str(ROOT / "tests"))
    from lib.array_programs import difference, evict_some, random_program
    from recompute.testing.arrays import serving
    from recompute_cupy import adapter

    name = f"{count} random array programs, evicted at random, bit for bit"
    say(name)
    with serving(adapter):
        for seed in range(count):
            random = Random(seed)
            program = random_program(random)
            found = difference(program, adapter, rc.Cache(), after=evict_some(random))
            if found is not None:
                return Check(name, False, f"seed {seed}: {found}")
    return Check(name, True, "no difference")


# What a step costs


def step(xp: Any, weights: Sequence[Any], batch: Any, target: Any) -> list[Any]:
    """The gradients of a deep network with rectifiers and a squared error, the last layer's first."""
    layers = [batch]
    for weight in weights:
        layers.append(xp.maximum(layers[-1] @ weight, 0))
    back = layers[-1] - target
    gradients = []
    while len(layers) > 1:
        back = back * (layers.pop() > 0)
        weight = weights[len(layers) - 1]
        gradients.append(layers[-1].T @ back)
        back = back @ weight.T
    return gradients


def measure(
    name: str, limit: int | None, once: Callable[[], list[Any]], cache: rc.Cache | None, expected: list[bytes] | None,
    repetitions: int,
) -> tuple[Step, list[bytes]]:  # fmt: skip
    """Run a step, once to warm up; its figures, and digests of the gradients, which are looked at one by one."""
    import cupy

    say(name)
    digests = [digest_of(get(array)) for array in once()]
    before = None if cache is None else cache.stats()
    seconds = []
    with Peak() as peak:
        for _ in range(repetitions):
            cupy.cuda.Device().synchronize()
            start = perf_counter()
            for array in once():
                get(array)
            del array
            cupy.cuda.Device().synchronize()
            seconds.append(perf_counter() - start)
    evictions = recomputations = 0
    if cache is not None and before is not None:
        after = cache.stats()
        evictions = (after.evictions - before.evictions) // repetitions
        recomputations = (after.rematerializations - before.rematerializations) // repetitions
    same = expected is None or digests == expected
    say(f"  {median(seconds) * 1e3:,.1f} ms, {peak.most / 1e6:,.0f} MB, {recomputations} recomputed")
    return Step(name, limit, median(seconds), peak.most, evictions, recomputations, same), digests


def get(array: Any) -> Any:
    """A plain array."""
    return array.get() if isinstance(array, rc.Recomputable) else array


def digest_of(array: Any) -> bytes:
    from recompute_cupy import adapter

    digest = adapter.fingerprint(array)
    assert digest is not None
    return digest


def Peak() -> Any:
    """Watches the most bytes in use at a time, of CuPy's pools, in this thread."""
    import cupy

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy has no types
        name = "Peak"

        def __init__(self) -> None:
            self.used = self.most = cupy.get_default_memory_pool().used_bytes()

        def malloc_postprocess(self, *, mem_size: int, mem_ptr: int, **rest: Any) -> None:
            self.used += mem_size if mem_ptr else 0
            self.most = max(self.most, self.used)

        def free_postprocess(self, *, mem_size: int, **rest: Any) -> None:
            self.used -= mem_size

    return Peak()


def steps(quick: bool) -> list[Step]:
    """The same step on plain arrays, within budgets, and under limits of the allocator."""
    import cupy

    import recompute_cupy

    rc.adapters.register(cupy.ndarray, recompute_cupy.adapter)
    depth, width, images, repetitions = (10, 256, 512, 2) if quick else (60, 2_048, 8_192, 5)
    random = cupy.random.RandomState(0)
    weights = [
        random.standard_normal((width, width), dtype="f4") * np.float32((2 / width) ** 0.5) for _ in range(depth)
    ]
    batch, target = (random.standard_normal((images, width), dtype="f4") for _ in range(2))
    pool = cupy.get_default_memory_pool()

    def within(name: str, limit: int, allocator: bool) -> Step:
        cache = rc.Cache(None if allocator else {"cuda:0": limit})
        with recompute_cupy.install(cache, limit=limit) if allocator else nullcontext(), cache:
            xp, inputs = rc.namespace(cupy), rc.array((weights, batch, target))
            return measure(name, limit, lambda: step(xp, *inputs), cache, expected, repetitions)[0]

    baseline, expected = measure(
        "plain arrays", None, lambda: step(cupy, weights, batch, target), None, None, repetitions
    )
    found = [baseline]
    for what in ("budget", "limit"):
        for share in SHARES:
            pool.free_all_blocks()
            try:
                found.append(within(f"{what} {share:.0%}", int(share * baseline.peak), what == "limit"))
            except rc.BudgetError as error:
                say(f"{what} {share:.0%}: {error}")
    return found


# The page


def device() -> dict[str, str]:
    """The GPU, its driver, and the versions."""
    import cupy

    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "device": found["name"].decode(),
        "compute capability": f"{found['major']}.{found['minor']}",
        "memory": f"{found['totalGlobalMem'] / 1e9:.1f} GB",
        "devices": str(runtime.getDeviceCount()),
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "unknown",
        "driver supports CUDA": version_of(runtime.driverGetVersion()),
        "CUDA runtime": version_of(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
        "recompute": rc.__version__,
        **facts(),
    }


def version_of(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}"


def page(machine: dict[str, str], checked: list[Check], measured: list[Step], table: Callable[..., str]) -> str:
    base = measured[0]
    lines = [
        (
            case.name,
            f"{case.seconds * 1e3:,.1f}",
            number(case.seconds / base.seconds),
            f"{case.peak / 1e6:,.0f}",
            number(case.peak / base.peak),
            str(case.evictions),
            str(case.recomputations),
            "yes" if case.same else "NO",
        )
        for case in measured
    ]
    verdicts = [(check.name, "passed" if check.passed else "FAILED", check.said) for check in checked]
    missing = 2 * len(SHARES) + 1 - len(measured)
    header = ("", "ms a step", "times plain", "peak, MB", "of plain", "evictions", "recomputed", "same bits")
    return "\n\n".join(
        [
            "## Passed and failed",
            table(("", "", "said"), verdicts),
            "## A step of training",
            table(header, lines),
            "Shares are of the peak with plain arrays. A budget counts what the cache holds, without the "
            "temporaries of an operation; a limit is that of CuPy's pool, without a budget."
            + (f" {missing} of the budgets and limits are too small for the step." if missing else ""),
            "## Machine",
            table(("", "", ""), [(key, value, "") for key, value in machine.items()]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small network, few programs; writes nothing by default")
    parser.add_argument("--into", metavar="FOLDER", type=Path, help=f"where the results go, {RESULTS} by default")
    options = parser.parse_args()
    try:
        import cupy
    except ImportError as error:
        print(f"CuPy cannot be imported ({error}): nothing was run, and nothing was written", file=sys.stderr)
        return 2
    if not cupy.cuda.is_available():
        print("there is no CUDA device: nothing was run, and nothing was written", file=sys.stderr)
        return 2
    machine, checked, measured = device(), checks(options.quick), steps(options.quick)
    print(page(machine, checked, measured, plain))
    folder = options.into or (None if options.quick else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = HEAD + page(machine, checked, measured, markdown) + "\n"
        (folder / "cupy.md").write_text(text, encoding="utf-8")
        results = {"machine": machine, "checks": [*map(asdict, checked)], "steps": [*map(asdict, measured)]}
        (folder / "cupy.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    failed = [check.name for check in checked if not check.passed]
    failed += [case.name for case in measured if not case.same]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
