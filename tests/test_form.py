"""The two forms of the core: what can be compiled, and that nothing runs in another form than was asked for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

import recompute
from recompute import _form
from recompute._policy.tournament import Tournament

HOUSE = Path(recompute.__file__).parent
WANTED = {"RECOMPUTE_PLAIN": "", "RECOMPUTE_REQUIRE_COMPILED": ""}

compiled = pytest.mark.skipif(_form.name() == "plain", reason="there is nothing compiled")


def test_the_list_is_every_module_with_a_pxd() -> None:
    """A line in `MODULES` and a `.pxd` are what it takes, and neither is without the other."""
    with_pxd = {
        ".".join(("recompute", *path.relative_to(HOUSE).with_suffix("").parts)) for path in HOUSE.rglob("*.pxd")
    }
    assert set(_form.MODULES) == with_pxd
    assert len(_form.MODULES) == len(with_pxd)
    assert all(Path(_form.stem(name, HOUSE.parent) + ".py").exists() for name in _form.MODULES)


def test_one_form_is_loaded() -> None:
    """All that can be compiled is, or nothing; and it is the form that the environment asks for."""
    for name in _form.MODULES:
        import_module(name)
    assert set(_form.loaded().values()) == {_form.name() == "compiled"}
    _form.check()
    if _form.asked("RECOMPUTE_PLAIN"):
        assert _form.name() == "plain"
    if _form.asked("RECOMPUTE_REQUIRE_COMPILED"):
        assert _form.name() == "compiled"


@pytest.mark.parametrize("name", _form.MODULES)
def test_slots_and_fields_agree(name: str) -> None:
    """The classes that a `.pxd` declares have the fields that the `.py` has as slots."""
    start = Path(_form.stem(name, HOUSE.parent))
    slots: dict[str, set[str]] = {}
    for kind in ast.parse(start.with_suffix(".py").read_text()).body:
        for line in kind.body if isinstance(kind, ast.ClassDef) else []:
            match line:
                case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                    slots[kind.name] = set(ast.literal_eval(value))
    fields: dict[str, set[str]] = {}
    for text in start.with_suffix(".pxd").read_text().splitlines():
        if begins := re.match(r"cdef class (\w+)", text):
            name = begins[1]
            fields[name] = set()  # a class may be announced before it is declared
        elif field := re.match(r"    cdef (?:public |readonly )?[\w .*:\[\]]+?[ *](\w+)$", text):
            fields[name].add(field[1])
    assert fields == {name: slots[name] for name in fields}


def run(folder: Path, code: str = "import recompute", **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that finds the package in a folder, and has these variables."""
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=folder,
        env=os.environ | WANTED | {"PYTHONPATH": str(folder)} | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package as it is here, extensions included."""
    copytree(HOUSE, tmp_path / "recompute", ignore=ignore_patterns("__pycache__"))
    return tmp_path


DESCRIBED = "import recompute; print(recompute._form.described())"


def test_both_variables_exclude_each_other() -> None:
    """One line says so."""
    done = run(HOUSE.parent, RECOMPUTE_PLAIN="1", RECOMPUTE_REQUIRE_COMPILED="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("are both set: they exclude each other")


def test_the_plain_form_on_request() -> None:
    """Whatever is there."""
    assert run(HOUSE.parent, DESCRIBED, RECOMPUTE_PLAIN="1").stdout == "plain: RECOMPUTE_PLAIN is set\n"


def test_a_checkout_that_was_not_built_is_plain(copy: Path) -> None:
    """That is no news, unless the compiled form is required."""
    for path in [*copy.rglob("_built*"), *copy.rglob(f"*{_form.SUFFIX}")]:
        path.unlink()
    done = run(copy, DESCRIBED)
    assert done.stdout.startswith("plain: it was not built; ")
    assert done.stderr == ""
    assert "the compiled form cannot run: it was not built" in run(copy, RECOMPUTE_REQUIRE_COMPILED="1").stderr


def test_what_the_build_says_of_the_plain_form_is_told(copy: Path) -> None:
    """The reason is the first line of its record."""
    for path in [*copy.rglob("_built*"), *copy.rglob(f"*{_form.SUFFIX}")]:
        path.unlink()
    (copy / "recompute" / "_built.txt").write_text("there is no compiler\n")
    assert run(copy, DESCRIBED).stdout == "plain: there is no compiler\n"


@compiled
@pytest.mark.parametrize("end", [".py", ".pxd"])
def test_an_extension_older_than_its_source_is_refused(copy: Path, end: str) -> None:
    """The plain form runs and one warning says so; if the compiled one is required, it is an error."""
    (name, *_) = _form.MODULES
    with Path(_form.stem(name, copy) + end).open("a") as source:
        source.write("\n")
    done = run(copy, DESCRIBED)
    assert done.stdout.startswith(f"plain: edited since it was compiled: {name}; ")
    assert done.stderr.count("RuntimeWarning: recompute runs in its plain form: edited since") == 1
    required = run(copy, RECOMPUTE_REQUIRE_COMPILED="1")
    assert required.returncode == 1
    assert f"edited since it was compiled: {name}" in required.stderr.splitlines()[-1]
    assert run(copy, DESCRIBED, RECOMPUTE_PLAIN="1").stderr == ""


@compiled
def test_all_extensions_are_there_or_none_is_loaded(copy: Path) -> None:
    """That includes the one that has what the others have in common."""
    Path(_form.stem(_form.SHARED, copy) + _form.SUFFIX).unlink()
    done = run(copy, DESCRIBED)
    assert done.stdout.startswith(f"plain: edited since it was compiled: {_form.SHARED}; ")


@compiled
def test_an_extension_that_nobody_vouches_for_is_refused(copy: Path) -> None:
    """Without the record of its build nobody knows what it was made of."""
    for path in copy.rglob("_built*"):
        path.unlink()
    assert run(copy, DESCRIBED).stdout.startswith("plain: edited since it was compiled: ")


def test_a_traceback_shows_the_lines_of_the_source() -> None:
    """In either form."""
    with pytest.raises(IndexError) as caught:
        Tournament(2).set(100, 1.0, 1.0, 0.0, 0.0)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.name.rpartition(".")[2], os.path.basename(last.filename)) == ("_leaf", "tournament.py")
    source = (HOUSE / "_policy" / "tournament.py").read_text().splitlines()
    assert last.lineno is not None
    assert "raise IndexError" in source[last.lineno - 1]
