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

Compare the ratios, which were taken in one run. *Repeated* operators are those of one step, and *foresight* is what the
block did about the next steps when it was timed. Where plain training, run *again*, has other losses, its kernels are
not deterministic, and other losses in a block say nothing.

Without a device it says so, writes nothing, and the exit status is 2; it is 1 if a part failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import SUPPRESS
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any, Final

from _common import arguments, facts, markdown, page, say, write

PARTS: Final = {
    "tests": "_gpu_arrays:tests",
    "torch": "_gpu_torch:torch_steps",
    "batch": "_gpu_torch:largest",
    "shortage": "_gpu_torch:shortage",
    "streams": "_gpu_torch:streams",
    "compile": "_gpu_torch:compiled",
    "cupy": "_gpu_arrays:programs",
    "cupy-steps": "_gpu_arrays:steps",
    "jax": "_gpu_arrays:jax_peaks",
}
"""Each in a module of its own libraries, of which some may not be there."""

Table = list[dict[str, Any]]
"""What was seen, by whatever name."""


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
        module, _, name = PARTS[options.one].partition(":")
        for row in getattr(import_module(module), name)(options.small):
            print(json.dumps(row), flush=True)
        return
    found: dict[str, Table] = {}
    driver = Path("/proc/driver/nvidia/version")
    told = driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else "not known"
    machine = facts("torch", "cupy-cuda13x", "cupy-cuda12x", "jax", devices=", ".join(names), driver=told)
    end = perf_counter() + options.limit
    for part in options.parts.split(","):
        found[part] = in_time(part, options.small, end - perf_counter())
        print(section(part, found[part]), flush=True)
        sections = [section(name, table) for name, table in found.items()]
        text = page("On a GPU", __doc__, *sections, machine=machine)
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


if __name__ == "__main__":
    main()
