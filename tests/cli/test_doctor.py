"""`recompute doctor`: every adapter is a line, and a broken one breaks nothing else."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from bare_python import bare

import recompute
from recompute import _form
from recompute._cli import main

Install = Callable[..., None]

ADAPTERS = """\
from recompute.adapters import Adapter

class Good(Adapter):
    name = "good"
    def devices(self): return ["cpu", "gpu:0", "gpu:1"]
    def free_memory(self, device): return {"gpu:0": 5_000_000}.get(device)

class Blind(Adapter):
    def devices(self): raise OSError("no driver")

good, blind, other = Good(), Blind(), object()
print("loaded")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with these adapters on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(entry_points: str, name: str = "some-adapters") -> None:
        metadata = tmp_path / f"{name.replace('-', '_')}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(f"[recompute.adapters]\n{entry_points}\n")
        (tmp_path / "doctored_adapters.py").write_text(ADAPTERS)
        (tmp_path / "doctored_failing.py").write_text("raise RuntimeError('two\\nlines')\n")
        (tmp_path / "doctored_bound.py").write_text("import no_such_framework\n")
        for framework in ("doctored", "healthy"):
            (tmp_path / f"{framework}.py").write_text("")
        (tmp_path / "only_a_folder").mkdir(exist_ok=True)
        importlib.invalidate_caches()

    monkeypatch.delitem(sys.modules, "doctored_adapters", raising=False)
    return install


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON object of `recompute doctor --json`."""
    capsys.readouterr()
    status = main(["doctor", "--json"])
    return status, json.loads(capsys.readouterr().out)


def adapter(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [adapter for adapter in report["adapters"] if adapter["name"] == name]
    return dict(found)


def test_which_form_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled, or plain and why."""
    assert examine(capsys)[1]["form"] == _form.described()
    main(["doctor"])
    assert f"form        {_form.name()}" in capsys.readouterr().out


def test_adapter_and_what_it_sees(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter that loads is listed with its distribution, its devices and the free memory on each."""
    install("doctored_adapters = doctored_adapters:good")
    _, report = examine(capsys)
    found = adapter(report, "doctored_adapters")
    assert (found["distribution"], found["version"]) == ("some-adapters", "1.5")
    assert (found["state"], found["error"]) == ("ok", None)
    assert {name: found["devices"][name] for name in ("gpu:0", "gpu:1")} == {"gpu:0": 5_000_000, "gpu:1": None}
    main(["doctor"])
    assert "gpu:0 (5 MB free), gpu:1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("doctored_failing:adapter", "RuntimeError: two lines"),
        ("doctored_adapters:nothing", "AttributeError"),
        ("doctored_adapters:other", "not an instance of recompute.adapters.Adapter"),
        ("doctored_adapters:blind", "OSError: no driver"),
        ("no_such_module:adapter", "No module named 'no_such_module'"),
    ],
)
def test_broken_adapter_is_a_line(install: Install, capsys: pytest.CaptureFixture[str], entry: str, says: str) -> None:
    """A broken adapter is status 1 and one line that says why; the others are still examined."""
    install(f"doctored = {entry}\nhealthy = doctored_adapters:good")
    status, report = examine(capsys)
    assert status == 1
    assert adapter(report, "doctored")["state"] == "broken"
    assert says in adapter(report, "doctored")["error"]
    assert adapter(report, "healthy")["state"] == "ok"
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "broken" in out
    (line,) = [splitline for splitline in err.splitlines() if splitline.startswith("recompute: error: ")]
    assert says in line


def test_missing_framework_is_no_error(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter whose framework is not installed is not broken."""
    install("no_such_framework = doctored_bound:adapter")
    _, report = examine(capsys)
    assert adapter(report, "no_such_framework")["state"] == "missing"
    main(["doctor"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("no_such_framework")]
    assert "not installed: pip install no_such_framework" in line


@pytest.mark.parametrize("name", ["no_such_framework", "only_a_folder"])
def test_adapter_that_loads_without_its_framework(
    install: Install, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Some adapters import nothing: what they serve is looked for, and a folder of that name is not it."""
    install(f"{name} = doctored_adapters:blind\nhealthy = doctored_adapters:good")
    status, report = examine(capsys)
    assert status == 0
    assert (adapter(report, name)["state"], adapter(report, name)["devices"]) == ("missing", {})
    assert adapter(report, "healthy")["state"] == "ok"


def test_versions_of_what_is_served(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """The version of the framework, also where its distribution has another name; unknown where there is none."""
    install("numpy = doctored_adapters:good\n_pytest = doctored_adapters:good\nhealthy = doctored_adapters:good")
    _, report = examine(capsys)
    doctored = [adapter for adapter in report["adapters"] if adapter["module"].startswith("doctored")]
    versions = {adapter["name"]: adapter["serves"] for adapter in doctored}
    assert versions == {"numpy": version("numpy"), "_pytest": version("pytest"), "healthy": None}
    main(["doctor"])
    assert ["numpy", version("numpy")] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_one_adapter_of_two_packages_is_one_line(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """What serves several packages of one version, or none that is installed, is listed once with all their names."""
    install("no_such_one = doctored_bound:adapter\nno_such_two = doctored_bound:adapter")
    main(["doctor"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "doctored_bound" in line]
    assert line.split()[:2] == ["no_such_one,", "no_such_two"]


def test_duplicates_are_named(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two adapters for one package the one that is used and the one that is not are named."""
    install("twice = doctored_adapters:good")
    install("twice = doctored_adapters:blind", "more-adapters")
    _, report = examine(capsys)
    (warning,) = [warning for warning in report["warnings"] if "'twice'" in warning]
    assert "doctored_adapters:blind is used, doctored_adapters:good is not" in warning


def test_extras_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """Python, recompute and the optional packages are listed."""
    _, report = examine(capsys)
    assert report["recompute"] == recompute.__version__
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(report["extras"]) == ["numpy", "matplotlib", "psutil", "rich", "scipy", "hypothesis"]
    main(["doctor"])
    out = capsys.readouterr().out
    assert recompute.__version__ in out
    assert all(package in out for package in report["extras"])


def test_nothing_installed(tmp_path: Path) -> None:
    """Without extras and without the package's metadata it still answers, with status 0, and says what is missing."""
    result = bare(tmp_path, "doctor")
    assert result.returncode == 0
    assert "missing: pip install '.[numpy]' in a checkout" in result.stdout
    assert "no adapters were found" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("recompute: warning: recompute itself is not installed")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` has a line for each of recompute, Python and what is installed of all that it serves or uses."""
    assert main(["--version"]) == 0
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert list(found)[:2] == ["recompute", "python"]
    assert found["recompute"] == recompute.__version__
    assert found["hypothesis"] == version("hypothesis")


def test_standard_output_may_be_closed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As for the other commands, what would be printed there is not."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["doctor"]) == main(["doctor", "--json"])
    assert "AttributeError" not in capsys.readouterr().err
