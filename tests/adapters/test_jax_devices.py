"""JAX with several devices, and short of memory: tests that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="the extra 'jax' is not installed")

HERE = Path(__file__).resolve().parent
FOUR = "--xla_force_host_platform_device_count=4"
QUICK = "--xla_backend_optimization_level=0"  # of LLVM, which takes most of the time, after the buffers are placed


def run(name: str, **environment: str) -> None:
    """Run the tests of a file in a new process; what fails there is printed here."""
    paths = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "adapters")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(HERE / name)]
    made = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), **environment}
    done = subprocess.run(command, env=made, capture_output=True, text=True, timeout=380, check=False)
    if done.returncode:
        pytest.fail(f"{name}:\n{done.stdout}\n{done.stderr}", pytrace=False)


def test_four_devices() -> None:
    """Sharded, replicated and committed arrays: bytes where they lie, and recomputed to where they were."""
    run("_jax_on_four_devices.py", XLA_FLAGS=FOUR)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space of a process")
def test_short_of_memory() -> None:
    """RESOURCE_EXHAUSTED, raised by real allocations, makes the cache release memory and the operation run again."""
    run("_jax_short_of_memory.py", XLA_FLAGS="")


def test_planned_on_four_devices() -> None:
    """Planned programs over several devices, and inside of shard_map."""
    run("_jax_remat_on_four_devices.py", XLA_FLAGS=f"{FOUR} {QUICK}")


def test_planned_in_outer_jits_on_four_devices() -> None:
    """Planned programs over several devices as parts of others, with and without a mesh in force."""
    run("_jax_remat_in_outer_jits.py", XLA_FLAGS=f"{FOUR} {QUICK}")
