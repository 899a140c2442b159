"""Systems without some of Unix: every module is imported there all the same."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import recompute

ROOT = Path(recompute.__file__).parents[1]
ADAPTERS = {
    "recompute_numpy": "numpy",
    "recompute_autograd": "autograd",
    "recompute_tables": "",
    "recompute_pillow": "PIL",
    "recompute_dask": "distributed",
    "recompute_jax": "jax",
    "recompute_torch": "torch",
}
LESS = """
import importlib, os, pkgutil, sys
for name in {before!r}:
    importlib.import_module(name)
for name in ("fcntl", "resource", "pwd", "termios"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "getuid", "sched_getaffinity", "setpriority", "pwrite", "preadv"):
    if hasattr(os, name):
        delattr(os, name)
package = importlib.import_module({package!r})
names = [{package!r}]
for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
    if not module.name.endswith("__main__") and not module.name.startswith({left!r}):
        importlib.import_module(module.name)
        names.append(module.name)
print(len(names))
"""


def run(package: str, before: list[str], left: tuple[str, ...] = (), more: str = "") -> str:
    code = LESS.format(package=package, before=before, left=left) + more
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library() -> None:
    """Each module of the library is imported; values are made, and move to a disk."""
    more = """
import recompute as rc
with rc.Cache("100kB", tiers=[rc.Disk("1MB")]) as cache:
    values = [rc.pure(bytes([n]) * 30_000) for n in range(8)]
    print([value.get()[0] for value in values] == list(range(8)), cache.stats().peak <= 100_000)
"""
    left = tuple(f"recompute.testing.{name}" for name in ("strategies",)) if find_spec("hypothesis") is None else ()
    count, worked = run("recompute", [], left, more).split("\n")[:2]
    assert int(count) > 150
    assert worked == "True True"


@pytest.mark.parametrize("package", ADAPTERS)
def test_adapters(package: str) -> None:
    """Each module of an adapter is imported, if its framework, which has been imported before, is installed."""
    framework = ADAPTERS[package]
    if framework and find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    left = ("recompute_torch.lightning", "recompute_torch.transformers", "recompute_torch.accelerate")
    if find_spec("diffrax") is None:
        left += ("recompute_jax.diffrax",)
    assert int(run(package, [framework] if framework else [], left)) >= 1
