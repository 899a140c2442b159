"""Compiles the core where that can be done; else the same files are installed as plain Python, and why is recorded.

The modules are those of `recompute._form.MODULES`. The extensions go beside the `.py`: into the wheel, or into the
checkout if it is installed as editable. RECOMPUTE_PLAIN=1 builds none; RECOMPUTE_REQUIRE_COMPILED=1 makes the build
fail if they cannot be built. RECOMPUTE_BUILD_CACHE names a folder where extensions are kept for the next build of the
same sources, and their C sources for another Python's.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
import traceback
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,  # types are in the .pxd alone
    "auto_pickle": False,
    "nonecheck": True,  # without it, None as a typed argument is written into
    "overflowcheck": True,
}
LEVEL = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O1"]
"""-O2 compiles a third longer, for 3 % fewer instructions in an operation. What CFLAGS says counts."""
FLAGS = [*LEVEL, "-g0", "-fvisibility=hidden", "-ffp-contract=off"] if os.name == "posix" else []
"""The last: rounded as Python does, on every processor, so that both forms decide alike."""


class Hook(BuildHookInterface[Any]):
    """What hatchling calls before it builds a wheel, and after that."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="recompute-build-"))
        form = form_of(Path(self.root))
        plain, required = form.asked_for()
        built: dict[str, Path] = {}
        if plain:
            told = "RECOMPUTE_PLAIN was set when it was built"
        elif platform.python_implementation() != "CPython":
            told = f"it was built for {platform.python_implementation()}"
        else:
            try:
                built = self.kept(form)
                told = "compiled"
            except (Exception, SystemExit) as error:  # whatever it is, it must not keep the library out
                if required:
                    raise
                traceback.print_exc()
                told = " ".join(f"it could not be compiled: {error or type(error).__name__}".split())
        if required and not built:
            raise RuntimeError(f"RECOMPUTE_REQUIRE_COMPILED is set: {told}")
        self.app.display_info(f"recompute-cache: {told}")
        record = self.folder / "record"
        lines = [f"{name} {form.digest(name, self.root)}" for name in form.MODULES if built]
        record.write_text("\n".join([told, *lines, ""]), encoding="utf-8")
        names = {file: form.stem(name, "") + form.SUFFIX for name, file in built.items()}
        if version == "editable":
            for name in form.EXTENSIONS:
                Path(form.stem(name, self.root) + form.SUFFIX).unlink(missing_ok=True)
            for file, place in (names | {record: f"recompute/{form.RECORDS[0]}"}).items():
                put(file, Path(self.root, place))
            return
        for file, place in (names | {record: f"recompute/{form.RECORDS[1]}"}).items():
            build_data["force_include"][str(file)] = place
        if built:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def kept(self, form: ModuleType) -> dict[str, Path]:
        """As `compile`; from a folder where they are kept, if one is named."""
        cache = os.environ.get("RECOMPUTE_BUILD_CACHE")
        if not cache:
            return self.compile(form)
        import Cython

        made_of = [form.digest(name, self.root) for name in form.MODULES]
        made_of += [Cython.__version__, form.SUFFIX, repr(FLAGS), repr(DIRECTIVES)]
        folder = Path(cache, sha256("\n".join(made_of).encode()).hexdigest())
        kept = {name: folder / (name + form.SUFFIX) for name in form.EXTENSIONS}
        if not all(file.exists() for file in kept.values()):
            folder.mkdir(parents=True, exist_ok=True)
            for name, file in self.compile(form, str(Path(cache, "c"))).items():
                put(file, kept[name])
        return kept

    def compile(self, form: ModuleType, cache: str | bool = False) -> dict[str, Path]:
        """The extensions, by module, in a folder of their own. `cache`: where Cython keeps what it makes."""
        from Cython.Build import cythonize
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext

        files = {name: form.stem(name, "") + ".py" for name in form.MODULES}
        files[form.SHARED] = form.stem(form.SHARED, "") + ".c"  # which Cython writes
        sources = [Extension(name, [file], extra_compile_args=FLAGS) for name, file in files.items()]
        jobs = min(len(sources), os.cpu_count() or 1)
        before = os.getcwd()
        os.chdir(self.root)  # so that tracebacks have paths that begin at the package
        try:
            extensions = cythonize(
                sources,
                build_dir=str(self.folder / "c"),
                compiler_directives=DIRECTIVES,
                shared_utility_qualified_name=form.SHARED,  # a third less to compile
                nthreads=jobs if jobs > 1 else 0,
                quiet=True,
                cache=cache,
            )
            command = build_ext(Distribution({"ext_modules": extensions}))
            command.build_lib, command.build_temp = str(self.folder / "lib"), str(self.folder / "temp")
            command.parallel = jobs
            command.ensure_finalized()
            command.run()
            return {
                extension.name: Path(command.get_ext_fullpath(extension.name)).resolve() for extension in extensions
            }
        finally:
            os.chdir(before)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def form_of(root: Path) -> ModuleType:
    """`recompute._form`, without an import of the package."""
    spec = importlib.util.spec_from_file_location("form", root / "recompute" / "_form.py")
    assert spec is not None
    assert spec.loader is not None
    form = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(form)
    return form


def put(file: Path, place: Path) -> None:
    """Copy a file so that whoever has the old one open keeps it, and nobody sees half of the new one."""
    new = place.with_name(f"{place.name}.{os.getpid()}")
    shutil.copyfile(file, new)
    shutil.copymode(file, new)
    os.replace(new, place)
