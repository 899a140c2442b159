"""The parts of gpu.py that run tests, and those about arrays of CuPy and JAX, each the rows of a table."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from hashlib import sha256
from importlib.util import find_spec
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from _common import ROOT, apart, say

Row = dict[str, Any]
"""What was seen, by whatever name."""


def said(what: str, command: Sequence[str], **environment: str) -> Row:
    """A program of its own: what it said last."""
    say(f"  {what}")
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    row = {"program": what, "said": lines[-1].strip(" =") if lines else ""}
    return row if done.returncode in (0, 5) else row | {"failed": done.returncode}


def tests(small: bool) -> Iterator[Row]:
    """Those whose names say that they need a device, CuPy's, and those of arrays on CuPy's."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = sorted({*(ROOT / "tests").rglob("test_*gpu*.py"), *(ROOT / "tests" / "adapters").glob("test_cupy*.py")})
    for path in files:
        yield said(path.relative_to(ROOT).as_posix(), [*pytest, str(path)])
    if find_spec("cupy"):
        yield said("tests/arrays, with CuPy", [*pytest, str(ROOT / "tests" / "arrays")], ARRAY_LIBRARY="cupy")


def programs(small: bool) -> Iterator[Row]:
    """Random array programs, half of the arrays evicted after every line, and on plain ones; then examples."""
    sys.path.append(str(ROOT / "tests"))
    import recompute as rc
    from lib.array_programs import difference, evict_some, random_program
    from recompute.testing.arrays import serving
    from recompute_cupy import adapter

    count = 20 if small else 200
    row: Row = {"program": f"{count} random array programs, evicted at random, bit for bit", "said": "no difference"}
    with serving(adapter):
        for seed in range(count):
            random = Random(seed)
            found = difference(random_program(random), adapter, rc.Cache(), after=evict_some(random))
            if found is not None:
                row |= {"said": f"seed {seed}: {found}", "failed": "other bits"}
                break
    yield row
    for path in sorted((ROOT / "docs" / "examples").glob("*.py")):
        if "--library" in path.read_text(encoding="utf-8"):
            yield said(f"docs/examples/{path.name} --library cupy", [str(path), "--library", "cupy"])


def gradients_by_hand(xp: Any, weights: Sequence[Any], batch: Any, target: Any) -> list[Any]:
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


def steps(small: bool) -> Iterator[Row]:
    """A step on plain arrays, within budgets, and under limits of the allocator, as shares of the first one's peak."""
    import cupy
    import numpy as np

    import recompute as rc
    import recompute_cupy

    rc.adapters.register(cupy.ndarray, recompute_cupy.adapter)
    depth, width, images, repetitions = (10, 256, 512, 2) if small else (60, 2_048, 8_192, 5)
    random = cupy.random.RandomState(0)
    weights = [
        random.standard_normal((width, width), dtype="f4") * np.float32((2 / width) ** 0.5) for _ in range(depth)
    ]
    batch, target = (random.standard_normal((images, width), dtype="f4") for _ in range(2))

    def get(array: Any) -> Any:
        return array.get() if isinstance(array, rc.Recomputable) else array

    def measured(once: Callable[[], list[Any]], cache: rc.Cache | None) -> Row:
        """Run it, once to warm up; its figures, and digests of the gradients, which are looked at one by one."""
        row: Row = {"digests": [recompute_cupy.adapter.fingerprint(get(array)) for array in once()]}
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
        row |= {"seconds": median(seconds), "peak": peak.most}
        if cache is not None and before is not None:
            after = cache.stats()
            row["evictions"] = (after.evictions - before.evictions) // repetitions
            row["recomputed"] = (after.rematerializations - before.rematerializations) // repetitions
        return row

    def within(limit: int, *, allocator: bool) -> Row:
        cache = rc.Cache(None if allocator else {"cuda:0": limit})
        with recompute_cupy.install(cache, limit=limit) if allocator else nullcontext(), cache:
            xp, inputs = rc.namespace(cupy), rc.array((weights, batch, target))
            return measured(lambda: gradients_by_hand(xp, *inputs), cache)

    plain = measured(lambda: gradients_by_hand(cupy, weights, batch, target), None)

    def told(way: str, row: Row) -> Row:
        shown: Row = {"way": way, "ms": round(1e3 * row["seconds"], 1)}
        shown |= {"times plain": round(row["seconds"] / plain["seconds"], 2), "peak MB": row["peak"] // 10**6}
        shown |= {"of plain": round(row["peak"] / plain["peak"], 2), "evictions": row.get("evictions", "")}
        shown |= {"recomputed": row.get("recomputed", ""), "same bits": row["digests"] == plain["digests"]}
        return shown if shown["same bits"] else shown | {"failed": "other bits"}

    yield told("plain arrays", plain)
    for what in ("budget", "limit of the pool"):
        for share in (1.0, 0.75, 0.5, 0.4, 0.3):
            cupy.get_default_memory_pool().free_all_blocks()
            try:
                yield told(f"{what}, {share:.0%}", within(int(share * plain["peak"]), allocator=what != "budget"))
            except rc.BudgetError as error:
                say(f"{what} {share:.0%}: {error}")
                yield {"way": f"{what}, {share:.0%}", "peak MB": "BudgetError"}


def jax_peaks(small: bool) -> Iterator[Row]:
    """A deep chain of layers under jit, in several ways. Each is a process of its own, since that has one peak."""
    plain: Row | None = None
    for way in ("plain", "jax.checkpoint for each layer", "of_peak=0.8", "of_peak=0.6", "of_peak=0.4", "of_peak=0.3"):
        try:
            row = apart(jax_step, 16 if small else 4096, way)
        except Exception as error:  # what one way cannot do says nothing about the next
            yield {"way": way, "failed": f"{type(error).__name__}: {error}"[:100]}
            continue
        plain = plain or row
        same = row["digest"] == plain["digest"]
        shown = {"way": way, "ms": row["ms"], "peak MB": row["peak MB"]}
        yield shown | {"times plain": round(row["ms"] / plain["ms"], 2), "same bits": same}


def jax_step(width: int, way: str) -> Row:
    """In a process of its own."""
    import jax

    from recompute_jax import remat

    keys = jax.random.split(jax.random.key(0), 33)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:32]]
    x = jax.random.normal(keys[32], (4 * width, width))

    def layer(x: Any, weight: Any) -> Any:
        return jax.numpy.tanh(x @ weight)

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = (jax.checkpoint(layer) if "checkpoint" in way else layer)(x, weight)
        return (x**2).sum()

    gradient = jax.grad(loss)
    step = jax.jit(remat(gradient, of_peak=float(way.partition("=")[2])) if "=" in way else gradient)
    found = jax.block_until_ready(step(weights, x))
    digest = sha256(b"".join(one.tobytes() for one in jax.device_get(found))).hexdigest()
    del found
    seconds = []
    for _ in range(3):
        began = perf_counter()
        jax.block_until_ready(step(weights, x))
        seconds.append(perf_counter() - began)
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", 0) // 10**6
    return {"ms": round(1e3 * median(seconds), 2), "digest": digest, "peak MB": peak}
