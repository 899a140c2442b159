"""Everything that needs a CUDA device, in one command: `python benchmarks/gpu.py --into docs/results`.

It writes gpu.md and gpu.json there; `--parts torch,tests` chooses. Each part is a process of its own. All together have
`--limit` seconds; of a part that is cut off the rows so far are kept:

    tests    the tests of the adapters that need a device
    torch    training in less memory, in several ways: peak by the device's own statistics, milliseconds per step
    batch    the largest batch of a training in a fixed part of the device's memory, with and without a block
    shortage training in less memory than it needs, with "auto": allocations fail, and are retried
    streams  training on a separate stream, compared with the default stream
    compile  a loss and its gradients under torch.compile: inductor's kernels, CUDA graphs, and `rt.compile`
    cupy     random array programs on wrapped arrays of CuPy's, and the examples of the documentation that know CuPy
    cupy-steps   a step of training on CuPy's arrays, within budgets, and under limits of the allocator
    jax      gradients under jit in several ways: the peak of bytes in use by the device's statistics, milliseconds

Without a device it says so, writes nothing, and the exit status is 2; it is 1 if a part failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import eq
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any, Final

from _common import ROOT, arguments, facts, markdown, page, say, write
from _gpu_arrays import Row, cupy, cupy_steps, jax_peaks, said

SHARES: Final = (0.8, 0.6, 0.5, 0.4)
MODELS: Final = ("gpt2", "resnet", "unet", "vit")
BATCHES: Final = {"gpt2": 16, "resnet": 16, "unet": 16, "vit": 16}
"""How many times the batch of benchmarks/torch_sizes.py."""
STEPS: Final = 7
LEARNING: Final = 15
"""Steps of a block, at most, before it is timed: by then it has a plan, or will have none."""

ABOUT: Final = """\
Made by `python benchmarks/gpu.py`. Compare the ratios, which were taken in one run. Peaks are those of the device's own
statistics. *Repeated* operators are those of one step, and *foresight* is what the block did about the next steps when
it was timed. Where plain training, run *again*, has other losses, its kernels are not deterministic, and other losses
in a block say nothing."""

Table = list[Row]


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0], into=None)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, separated by commas; %(default)s")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for all parts; %(default)s")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it runs")
    parser.add_argument("--one", help=SUPPRESS)
    options = parser.parse_args()
    names = devices()
    if not names:
        say("there is no CUDA device here, as far as PyTorch, CuPy and JAX know: nothing was run")
        raise SystemExit(2)
    if options.one:
        for row in PARTS[options.one](options.small):
            print(json.dumps(row), flush=True)
        return
    found: dict[str, Table] = {}
    machine = facts() | {"devices": ", ".join(names)} | versions()
    end = perf_counter() + options.limit
    for part in options.parts.split(","):
        found[part] = in_time(part, options.small, end - perf_counter())
        print(section(part, found[part]), flush=True)
        sections = [section(name, table) for name, table in found.items()]
        text = page("# On a GPU", ABOUT, *sections, machine=machine)
        write(options.into, "gpu", text, {"machine": machine, "parts": found})  # now: the machine's time may be up
    if any("failed" in row for table in found.values() for row in table):
        raise SystemExit(1)


def devices() -> list[str]:
    """The names of the CUDA devices, by whichever library is there."""
    try:
        import torch

        if torch.cuda.is_available():
            return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    except ImportError:
        pass
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        return [cupy.cuda.runtime.getDeviceProperties(number)["name"].decode() for number in range(count)]
    except Exception:  # it is not installed, or finds no driver
        pass
    try:
        import jax

        return [device.device_kind for device in jax.devices() if device.platform == "gpu"]
    except (ImportError, RuntimeError):
        return []


def versions() -> dict[str, str]:
    """Of the libraries and the driver."""
    found = {}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "jax"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    driver = Path("/proc/driver/nvidia/version")
    return found | ({"driver": driver.read_text(encoding="utf-8").splitlines()[0]} if driver.exists() else {})


def in_time(part: str, small: bool, seconds: float) -> Table:
    """A part in a process of its own, which must end in time: its rows, and why there are no more, if it failed."""
    say(part)
    command = [sys.executable, __file__, "--one", part, *(["--small"] if small else [])]
    failed = ""
    with TemporaryFile("w+", encoding="utf-8") as rows, TemporaryFile("w+", encoding="utf-8") as errors:
        try:
            done = subprocess.run(command, stdout=rows, stderr=errors, check=False, timeout=max(0.0, seconds))
            if done.returncode:
                errors.seek(0)
                failed = (errors.read().strip().splitlines() or [f"exit {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            failed = f"not over after {seconds:.0f} seconds"
        rows.seek(0)
        table: Table = [json.loads(line) for line in rows if line.startswith("{")]
    return [*table, {"failed": failed}] if failed else table


def section(part: str, table: Table) -> str:
    """The table of a part, with what was seen by whatever name."""
    columns = list(dict.fromkeys(name for row in table for name in row))
    return f"## {part}\n\n" + markdown(columns, [tuple(str(row.get(name, "")) for name in columns) for row in table])


# --- Tests ------------------------------------------------------------------------------------------------------------


def tests(small: bool) -> Iterator[Row]:
    """Those whose names say that they need a device, CuPy's, and those of arrays on CuPy's."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    files = sorted({*(ROOT / "tests").rglob("test_*gpu*.py"), *(ROOT / "tests" / "adapters").glob("test_cupy*.py")})
    for path in files:
        yield said(path.relative_to(ROOT).as_posix(), [*pytest, str(path)])
    if find_spec("cupy"):
        yield said("tests/arrays, with CuPy", [*pytest, str(ROOT / "tests" / "arrays")], ARRAY_LIBRARY="cupy")


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def training(model: str, small: bool, batch: int = 4, run: Callable[..., Any] | None = None) -> Any:
    """A training of benchmarks/torch_sizes.py on the device; its batch so many times as large."""
    import torch
    from _torch_sizes_models import MODELS as MAKERS
    from _torch_sizes_models import straight

    torch.manual_seed(0)
    made = MAKERS[model](run or straight, small)
    made.module.cuda()
    made.x, made.y = [tensor.cuda().repeat(batch, *[1] * (tensor.dim() - 1)) for tensor in (made.x, made.y)]
    return made


def steps(task: Any, count: int, block: Any = None) -> tuple[float, int, list[float]]:
    """(seconds of the median step, peak by the device's statistics, losses).

    Timed are the last ones: two warm up before, or as many as a block needs to make its plan, at most 15.
    """
    import torch

    losses: list[float] = []
    for number in range(2 if block is None else LEARNING):
        losses.append(task.step().item())
        if number and block is not None and not block.stats().foresight.startswith(("recording", "planning")):
            break
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(count):
        began = perf_counter()
        losses.append(task.step().item())
        torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    return median(seconds), torch.cuda.max_memory_allocated(), losses


def ways(model: str, small: bool) -> dict[str, Callable[[], tuple[Any, AbstractContextManager[Any]]]]:
    """A training, and the context in which its steps run, by what the table calls it."""
    import torch
    from _torch_sizes_models import checkpointed

    import recompute as rc
    import recompute_torch as rt

    batch = 2 if small else BATCHES[model]

    def within(**options: Any) -> Callable[[], tuple[Any, AbstractContextManager[Any]]]:
        return lambda: (training(model, small, batch), rt.budget(**options))

    host = {"cuda:0": [rc.Host("64GB")]}
    return {
        "plain": lambda: (training(model, small, batch), nullcontext()),
        "plain, again": lambda: (training(model, small, batch), nullcontext()),
        "a checkpoint for each block": lambda: (training(model, small, batch, checkpointed), nullcontext()),
        "save_on_cpu, pinned": lambda: (training(model, small, batch), torch.autograd.graph.save_on_cpu(True)),
        "a block without a limit": within(),
        **{f"activations={share:.0%}": within(activations=f"{share:.0%}") for share in SHARES},
        f"activations={SHARES[-1]:.0%}, tier in host memory": within(activations=f"{SHARES[-1]:.0%}", tiers=host),
    }


def torch_steps(small: bool) -> Iterator[Row]:
    """Each way to train in less memory: its peak by the device's statistics, and the time of its median step."""
    import torch

    import recompute as rc
    import recompute_torch as rt

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    for model in MODELS:
        plain: tuple[float, int, list[float]] | None = None
        for way, make in ways(model, small).items():
            row: Row = {"model": model, "way": way}
            task, around = make()
            try:
                with around as block:
                    found = steps(task, STEPS, block if isinstance(block, rt.budget) else None)
                    if isinstance(block, rt.budget):
                        row["repeated"] = block.report().steps[-1].repeated
                        row["foresight"] = block.stats().foresight
                plain = plain or found
                row |= {
                    "ms": round(1e3 * found[0], 1),
                    "times plain": round(found[0] / plain[0], 2),
                    "peak MB": found[1] // 10**6,
                    "of plain": round(found[1] / plain[1], 2),
                    "same losses": all(map(eq, found[2], plain[2])),
                }
            except (rc.BudgetError, torch.OutOfMemoryError) as error:
                row["peak MB"] = type(error).__name__
                say(f"{model}, {way}: {error}")
            yield row
            del task, around, make
            torch.cuda.empty_cache()


def largest(small: bool) -> Iterator[Row]:
    """The largest batch within twice the memory that the first one takes, plainly and in a block."""
    import torch

    import recompute as rc
    import recompute_torch as rt

    for model in MODELS:
        _, peak, _ = steps(training(model, small, 1), 3)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * peak / total))
        row: Row = {"model": model, "memory MB": 2 * peak // 10**6}
        for way, around in (("plain", None), ("block", int(1.8 * peak))):  # the rest is for what lies beside tensors
            fits = 0
            for factor in (1, 2, 3, 4, 6, 8, 12):
                torch.cuda.empty_cache()
                try:
                    task = training(model, small, factor)
                    if around is None:
                        steps(task, 3)
                    else:
                        with rt.budget(around):
                            steps(task, 3)
                except (rc.BudgetError, torch.OutOfMemoryError):
                    break
                finally:
                    task = None
                fits = factor
            row[f"{way}, times the batch"] = fits
        yield row
        torch.cuda.set_per_process_memory_fraction(1.0)


def shortage(small: bool) -> Iterator[Row]:
    """In three quarters of the memory that it takes."""
    import torch

    import recompute_torch as rt

    torch.use_deterministic_algorithms(True, warn_only=True)
    for model in MODELS:
        _, peak, losses = steps(training(model, small), 4)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 0.75 * peak / total))
        row: Row = {"model": model, "memory MB": int(0.75 * peak) // 10**6}
        try:
            with rt.budget("auto") as block:
                _, most, found = steps(training(model, small), 4)
                row |= {"peak MB": most // 10**6, "evicted": block.stats().evictions, "same": found == losses}
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error)[:60]
        yield row
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def streams(small: bool) -> Iterator[Row]:
    """The same losses on a stream of its own."""
    import torch

    import recompute_torch as rt

    torch.use_deterministic_algorithms(True, warn_only=True)
    for model in MODELS:
        _, _, losses = steps(training(model, small), 4)
        stream = torch.cuda.Stream()
        task = training(model, small)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), rt.budget(activations="60%") as block:
            took, _, found = steps(task, 4)
            again = block.stats().rematerializations
        yield {"model": model, "same": found == losses, "repeated": again, "seconds": round(took, 4)}


def compiled(small: bool) -> Iterator[Row]:
    """Kernels of inductor with torch's partitioner and with a budget, and a backend without kernels within a budget."""
    import torch
    from _torch_compile_models import MODELS as MAKERS
    from _torch_sizes_models import straight

    import recompute_torch as rt

    torch.set_float32_matmul_precision("high")

    def halved(loss: Any) -> Any:
        step = torch.compile(loss)

        def run(x: Any, y: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=0.5):  # read as it is compiled
                return step(x, y)

        return run

    def planned(share: float, compiler: str) -> Callable[[Any], Any]:
        return lambda loss: rt.compile(loss, of_peak=share, compiler=compiler)

    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda loss: loss,
        "inductor": torch.compile,
        "inductor, CUDA graphs": lambda loss: torch.compile(loss, mode="reduce-overhead"),
        "inductor, activation_memory_budget=0.5": halved,
        **{f"rt.compile, inductor, of_peak={share}": planned(share, "inductor") for share in (0.7, 0.5)},
        **{f"rt.compile, boxed, of_peak={share}": planned(share, "boxed") for share in (0.6, 0.4)},
    }
    for model in ("gpt2", "resnet18"):
        base: tuple[float, int] | None = None
        for way, make in ways.items():
            torch._dynamo.reset()
            torch.manual_seed(0)
            task = MAKERS[model](straight, small)
            task.module.cuda()
            x, y = [tensor.cuda().repeat(16, *[1] * (tensor.dim() - 1)) for tensor in (task.x, task.y)]
            row: Row = {"model": model, "way": way}
            try:
                began = perf_counter()
                step = make(task)
                seconds, peak = gradients(step, task.module, x, y)
                base = base or (seconds, peak)
                row |= {"ms": round(1e3 * seconds, 1), "times eager": round(seconds / base[0], 2)}
                row |= {"peak MB": peak // 10**6, "of eager": round(peak / base[1], 2)}
                row["first call and all, s"] = round(perf_counter() - began, 1)
                if way.startswith("rt."):
                    row["planned MB"] = sum(plan.planned for plan in rt.plans(step)) // 10**6
            except Exception as error:  # what one way cannot do says nothing about the next
                row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            yield row
            torch.cuda.empty_cache()


def gradients(step: Any, module: Any, x: Any, y: Any) -> tuple[float, int]:
    """(seconds of the median loss with its gradients, bytes at the peak beyond those before), after two to warm up."""
    import torch

    seconds, most = [], 0
    for number in range(STEPS + 2):
        module.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = perf_counter()
        step(x, y).backward()
        torch.cuda.synchronize()
        if number > 1:
            seconds.append(perf_counter() - began)
            most = max(most, torch.cuda.max_memory_allocated() - before)
    return median(seconds), most


PARTS: Final[dict[str, Callable[[bool], Iterator[Row]]]] = {
    "tests": tests, "torch": torch_steps, "batch": largest, "shortage": shortage, "streams": streams,
    "compile": compiled, "cupy": cupy, "cupy-steps": cupy_steps, "jax": jax_peaks,
}  # fmt: skip


if __name__ == "__main__":
    main()
