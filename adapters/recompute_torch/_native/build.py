"""Builds the tracker for the installed torch, and keeps the builds of a user.

A build belongs to one torch: the same file would load into another version, and write where other things lie. So its
name has torch's version, its git hash, the ABI and a hash of the source, and all are checked before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

TRIED: Final = ("2.13.0", "2.14.1", "2.15.0")
"""Versions of torch; others are refused, since the layout of their storages may be another."""

SOURCE: Final = Path(__file__).parent
FOLDER_VARIABLE: Final = "RECOMPUTE_TORCH_CACHE"
_FLAGS: Final = ("-O3", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-Wno-attributes", "-Wno-unknown-pragmas")
_MAX_COMPILE_SECONDS: Final = 600
"""After which a compiler is given up."""


class Unavailable(RuntimeError):
    """There is no native path here; the text says why, and what to do."""


class NotBuilt(Unavailable):
    """There could be one."""


@dataclass(frozen=True)
class Status:
    """Whether the native path is there."""

    path: Path | None
    """The build for the installed torch; None: there is none yet."""
    reason: str
    """Why there can be none; empty: there is one, or can be."""

    def __str__(self) -> str:
        if self.reason:
            return f"Python path only: {self.reason}"
        if self.path is None:
            return "native path not built: python -m recompute_torch.build"
        return f"native path built: {self.path}"


def status() -> Status:
    """Whether there is a build, or can be. Builds nothing."""
    try:
        path = place()
        if check(path) == "":
            return Status(path, "")
        compiler()
    except Unavailable as error:
        return Status(None, str(error))
    return Status(None, "")


@cache
def source_hash() -> str:
    """Of all C++ files and the options of the compiler."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted([*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def identity() -> dict[str, str]:
    """What a build must agree with. Raises Unavailable for a torch or a platform that it was not tried with."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Unavailable(f"the native path is for Linux on x86-64 and ARM64, not {sys.platform} {platform.machine()}")
    version = torch.__version__.partition("+")[0]
    if version not in TRIED:
        raise NotBuilt(f"the native path was tried with torch {', '.join(TRIED)}, and this is {torch.__version__}")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        raise Unavailable(f"the native path is for the CPU alone, and torch sees a device here: {device}")
    return {
        "torch": torch.__version__,
        "git": torch.version.git_version or "",
        "abi": f"cxx11abi{int(torch.compiled_with_cxx11_abi())}",
        "machine": platform.machine(),
        "source": source_hash(),
    }


def place() -> Path:
    """The file for the installed torch: in $RECOMPUTE_TORCH_CACHE, or in the cache of the user. Raises Unavailable."""
    parts = identity()
    name = "-".join([parts["torch"], parts["git"][:12], parts["abi"], parts["machine"], parts["source"]])
    given, cache = os.environ.get(FOLDER_VARIABLE), os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(cache, "recompute", "torch")) / f"tracker-{name}.so"


def check(path: Path) -> str:
    """What is wrong with a build for the installed torch; empty: nothing."""
    record = path.with_suffix(".json")
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        content = path.read_bytes()
    except FileNotFoundError:
        return "there is none"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    if not isinstance(known, dict) or known.pop("digest", None) != _digest(content):
        return "it is not what was built"
    if known != identity():
        return "it was built for another torch, or from another source"
    return ""


def build(*, anew: bool = False) -> Path:
    """The build for the installed torch, made if there is none: it takes seconds. Raises Unavailable."""
    path = place()
    if not anew and check(path) == "":
        return path
    command = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if anew or check(path) != "":  # else another process was faster
                _compile(command, path)
    except OSError as error:
        raise NotBuilt(
            f"{path.parent} cannot be written to ({error.strerror or error}); set {FOLDER_VARIABLE} to one that can"
        ) from error
    return path


def compiler() -> str:
    """A C++ compiler: $CXX, or the first that is there. Raises Unavailable."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NotBuilt(f"there is no C++ compiler: {f'CXX={named}' if named else 'install g++'}")


def command_line(compiler: str, into: Path) -> list[str]:
    """What builds the tracker: one command, which needs neither headers of Python nor ninja."""
    home = Path(torch.__file__).parent
    includes = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include"]
    library = home / "lib"
    return [
        *(compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(f"-I{include}" for include in includes),
        *(str(SOURCE / "tracker.cpp"), "-o", str(into)),
        *(f"-L{library}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{library}"),
    ]


def _compile(compiler: str, path: Path) -> None:
    """Under other names first, so that half a file is never seen. The record is last: without it nothing loads."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as work:
        made = Path(work) / "tracker.so"
        try:
            ran = subprocess.run(
                command_line(compiler, made), capture_output=True, text=True, timeout=_MAX_COMPILE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotBuilt(f"{compiler} took more than {_MAX_COMPILE_SECONDS} seconds") from None
        if ran.returncode:
            last = "\n".join(ran.stderr.strip().splitlines()[-20:])
            raise NotBuilt(f"{compiler} failed:\n{last}")
        record = Path(work) / "tracker.json"
        record.write_text(json.dumps(identity() | {"digest": _digest(made.read_bytes())}), encoding="utf-8")
        path.with_suffix(".json").unlink(missing_ok=True)
        os.replace(made, path)
        os.replace(record, path.with_suffix(".json"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time."""
    import fcntl

    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
