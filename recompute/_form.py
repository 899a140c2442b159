"""Which form of the core runs: compiled, or the same files as plain Python.

Each of `MODULES` has a `.pxd` beside it, and is compiled when the library is installed (.build/hook.py). An extension
hides the `.py` beside it. All of them run compiled or all run plain: plain if any is missing, or older than its source.

RECOMPUTE_PLAIN=1, set before the first import, loads the plain form although the extensions are there.
RECOMPUTE_REQUIRE_COMPILED=1 makes that import fail where the compiled form cannot be loaded.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import source_hash
from pathlib import Path
from types import ModuleType

MODULES = (
    "recompute._policy.candidate",
    "recompute._policy.formulas",
    "recompute._policy.tournament",
    "recompute._policy.search",
    "recompute._adapters.kind",
    "recompute._engine.functions",
    "recompute._engine.graph",
    "recompute._engine.neighbours",
    "recompute._engine.needed",
    "recompute._engine.pool",
    "recompute._engine.machine",
    "recompute._engine.frames",
    "recompute._engine.sizes",
    "recompute._engine.arguments",
    "recompute._engine.reachable",
    "recompute._engine.results",
    "recompute._engine.changes",
    "recompute._engine.meter",
    "recompute._engine.journal",
    "recompute._engine.finalizer",
    "recompute._engine.scheduler",
    "recompute._engine.references",
    "recompute._engine.settling",
    "recompute._engine.memory",
    "recompute._engine.runs",
    "recompute._engine.engine",
    "recompute._engine.requests",
    "recompute._context",
    "recompute._handle",
    "recompute._foresight.repetition",
)

SHARED = "recompute._shared"
"""An extension that has no `.py`: what Cython needs in all of the others, compiled once."""

EXTENSIONS = (*MODULES, SHARED)

SUFFIX = EXTENSION_SUFFIXES[0]
"""Of an extension for this Python: in a checkout, each Python has its own."""

RECORDS = (f"_built{SUFFIX.rpartition('.')[0]}.txt", "_built.txt")
"""What the build wrote, in the folder of the package: how it went, and a line for each extension with its digest.

The first is for this Python, in a checkout; the other is in a wheel.
"""


def asked(name: str) -> bool:
    """Whether a variable of the environment is set, other than to 0 or no."""
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no")


def asked_for() -> tuple[bool, bool]:
    """Whether the plain form is asked for, and whether the compiled one is."""
    plain, compiled = asked("RECOMPUTE_PLAIN"), asked("RECOMPUTE_REQUIRE_COMPILED")
    if plain and compiled:
        raise ImportError("RECOMPUTE_PLAIN and RECOMPUTE_REQUIRE_COMPILED are both set: they exclude each other")
    return plain, compiled


def stem(name: str, root: str | os.PathLike[str]) -> str:
    """The path of a module without the end of its name. `root`: the folder that the package is in."""
    return os.path.join(root, *name.split("."))


def digest(name: str, root: str | os.PathLike[str]) -> str:
    """Of what an extension is made of."""
    start = stem(name, root)
    return source_hash(Path(start + ".py").read_bytes() + Path(start + ".pxd").read_bytes()).hex()


_THEIRS = ("bundle.py", "remote.py")
"""Files of the other distribution, of names that are none of ours."""


def refuse_a_mixture(folder: str) -> None:
    """Raise ImportError, with the cure, if the package's folder holds another distribution called recompute, too.

    That one runs commands on other machines. Whichever is installed later overwrites `__init__.py` of the other, and
    uninstalling either takes it away. Costs one look.
    """
    if all(os.path.exists(os.path.join(folder, name)) for name in _THEIRS):
        raise ImportError(
            f"two distributions are mixed up in {folder}: recompute-cache and another one called recompute, which "
            "share an import name; to mend it: pip uninstall recompute recompute-cache && "
            "pip install . in a checkout (the other one needs an environment of its own)"
        )


class PlainFinder:
    """Finds the source of the modules that can be compiled, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in MODULES:
            for folder in path or ():
                if found := FileFinder(folder, (SourceFileLoader, [".py"])).find_spec(name):
                    return found
        return None


def loaded() -> dict[str, bool]:
    """Of the modules that can be compiled and have been imported: whether they are."""
    specs = {name: sys.modules[name].__spec__ for name in MODULES if name in sys.modules}
    return {name: spec is not None and isinstance(spec.loader, ExtensionFileLoader) for name, spec in specs.items()}


def name() -> str:
    """The form that runs: "compiled" or "plain"."""
    return "plain" if _why_plain else "compiled"


def described() -> str:
    """The form that runs; of the plain one, why it does."""
    return f"plain: {_why_plain}" if _why_plain else "compiled"


def _record(root: str) -> tuple[str, dict[str, str]]:
    """How the build went, and the digest of each extension."""
    for record in RECORDS:
        try:
            told, *lines = Path(root, "recompute", record).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        return told, dict(line.split() for line in lines)
    return "it was not built; `pip install -e .` compiles a checkout", {}


def _is_of_its_source(name: str, root: str, known: str | None) -> bool:
    """Whether the extension is there, and was made of the files beside it; a frozen program may not have these."""
    if not os.path.exists(stem(name, root) + SUFFIX):
        return False
    try:
        return digest(name, root) == known
    except OSError:
        return True


def _look(root: str) -> tuple[str, bool]:
    """Why the compiled form cannot run; empty if it can. And whether to warn: it is there, in part or too old."""
    told, digests = _record(root)
    unfit = [name for name in MODULES if not _is_of_its_source(name, root, digests.get(name))]
    if not os.path.exists(stem(SHARED, root) + SUFFIX):
        unfit.append(SHARED)
    if not unfit:
        return "", False
    if not any(os.path.exists(stem(name, root) + SUFFIX) for name in MODULES):
        return told, False
    return f"edited since it was compiled: {', '.join(unfit)}; install it again, as `pip install -e .` does", True


def choose() -> str:
    """Choose the form, before any of its modules is imported: why the plain one runs, or nothing."""
    plain, required = asked_for()
    why, news = ("RECOMPUTE_PLAIN is set", False) if plain else _look(os.path.dirname(os.path.dirname(__file__)))
    if why and required:
        raise ImportError(f"RECOMPUTE_REQUIRE_COMPILED is set, and the compiled form cannot run: {why}")
    if news:
        warnings.warn(f"recompute runs in its plain form: {why}", RuntimeWarning, stacklevel=4)
    if why and PlainFinder not in sys.meta_path:
        sys.meta_path.insert(0, PlainFinder)
    return why


def check() -> None:
    """Raise ImportError unless the form that was chosen is the one that was loaded."""
    wrong = [name for name, compiled in loaded().items() if compiled == bool(_why_plain)]
    if wrong:
        raise ImportError(f"loaded in another form than the rest ({described()}): {', '.join(wrong)}")


_why_plain = ""
if __name__ == "recompute._form":  # the build reads this file under another name
    refuse_a_mixture(os.path.dirname(__file__))
    _why_plain = choose()
