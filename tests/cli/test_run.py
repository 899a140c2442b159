"""`recompute run`: scripts behave as under Python, the report is right, and errors are one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

import recompute
from recompute._cli import main
from recompute._live import Live, fit
from recompute.text import seconds
from recompute.traces import read

ROOT = Path(recompute.__file__).parents[1]

CHAIN = """\
import sys
import recompute as rc

def grow(x, n):
    return x + bytes([n]) * 0

def both(a, b):
    return bytes(len(a))

count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
values = [rc.pure(bytes(1000))]
for n in range(count):
    values.append(rc.ap(grow, values[-1], n))
total = values[0]
while values:
    total = rc.ap(both, total, values.pop())
print("answer", len(total.get()))
"""

Script = Callable[..., str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script and return its name."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write


SHORT = """
import recompute as rc
values = [rc.pure(0)]
for _ in range(12):
    values.append(rc.ap(lambda x: x + 1, values[-1], nbytes=1000))
for value in values[::-1]:
    value.get()
print("answer", values[-1].get())
"""


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python as a user would, with this recompute."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment, timeout=60, check=False, **options
    )


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_budget_in_bytes_is_kept_and_reported(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A script runs within its budget, its output is its own, and the table on stderr says what that cost."""
    assert main(["run", "--budget", "8kB", script(CHAIN)]) == 0
    out, err = capsys.readouterr()
    assert out == "answer 1000\n"
    table = {line[:20].strip(): line[20:].strip() for line in lines(err) if line.startswith("  ")}
    assert table["budget"] == "8 kB"
    assert int(table["evictions"]) > 0
    assert int(table["rematerializations"]) > 0
    assert float(table["overhead"]) > 1
    assert {"peak", "overshoot", "operations", "functions", "library", "process", "wall time"} <= set(table)
    assert any(line.split()[:1] == ["grow"] for line in lines(err))


def test_json_is_the_last_line(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the last line of stdout is one object, also after a script that leaves its own last line open."""
    text = CHAIN + "print('open', end='')\n"
    assert main(["run", "--budget", "8kB", "--policy", "lru", "--search", "ignore-small", "--json", script(text)]) == 0
    first, second, last = lines(capsys.readouterr().out)
    assert (first, second) == ("answer 1000", "open")
    figures = json.loads(last)
    assert figures["budget"] == 8000
    assert figures["peak"] <= 8000 + figures["overshoot"]
    assert (figures["policy"], figures["search"], figures["release"]) == ("lru", "ignore small", "eager")
    assert figures["status"] == 0
    assert figures["error"] is None
    assert figures["compute_time"] == figures["model_time"] + figures["remat_time"]
    assert figures["recomputed"][0]["function"] == "grow"
    assert len(figures["recomputed"]) <= 5


@pytest.mark.parametrize("more", [[], ["--budget", "9kB"], ["--record"]])
def test_a_report_is_a_page_beside_the_recording(
    script: Script, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """With --report the run is recorded, and a page says what each budget would cost; the status is the script's."""
    name = script(SHORT)
    assert main(["run", "--report", *more, name]) == 0
    out, err = capsys.readouterr()
    assert out == "answer 12\n"
    assert "script.report.html shows what each budget would cost" in err
    page = Path("script.report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "script.recompute.jsonl.gz: 12 operations" in page
    assert Path("script.recompute.jsonl.gz").exists()
    assert Path("script.recompute.json").exists() == (more == ["--record"])


def test_a_report_of_nothing(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that makes nothing in a cache has none, and is warned about as without --report."""
    assert main(["run", "--report", script("print(1)")]) == 0
    assert "made nothing in a cache" in capsys.readouterr().err
    assert not Path("script.report.html").exists()


def test_percentage_of_a_recording(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """`--record` measures the peak without a budget, and 50% is half of it."""
    name = script(CHAIN)
    assert main(["run", "--record", "--json", name]) == 0
    figures = json.loads(lines(capsys.readouterr().out)[-1])
    assert (figures["budget"], figures["evictions"]) == (None, 0)
    assert figures["recording"] == "script.recompute.json"
    recording = json.loads(Path("script.recompute.json").read_text())
    assert recording["peak"] == {"cpu": figures["peak"]}
    assert main(["run", "--budget", "50%", "--json", name]) == 0
    out, err = capsys.readouterr()
    assert json.loads(lines(out)[-1])["budget"] == figures["peak"] // 2
    assert "(50% of " in err
    assert "warning" not in err


def test_recording_elsewhere(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """`--recording` says where the recording is, and it stays valid when the folder moves."""
    name = script(CHAIN, "old/script.py")
    assert main(["run", "--record", "--recording", "old/peak.json", name]) == 0
    Path("old").rename("new")
    assert main(["run", "--budget", "50%", "--recording", "new/peak.json", "new/script.py"]) == 0
    assert "(50% of " in capsys.readouterr().err


def test_record_writes_a_trace(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """The events are next to the recording, the report says where, and they are a program that can be read."""
    name = script(CHAIN, "folder/script.py")
    assert main(["run", "--record", "--recording", "folder/peak.json", "--json", name]) == 0
    out, err = capsys.readouterr()
    assert json.loads(lines(out)[-1])["trace"] == str(Path("folder/script.recompute.jsonl.gz"))
    assert "script.recompute.jsonl.gz" in err
    program = read(Path("folder/script.recompute.jsonl.gz"))
    assert [call.name for call in program.calls] == ["grow"] * 20 + ["both"] * 21


def test_trace_of_any_run(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """`--trace` works under a budget, too; without it and `--record` there is none."""
    name = script(CHAIN)
    assert main(["run", "--budget", "8kB", "--trace", "mine.jsonl", "--json", name]) == 0
    figures = json.loads(lines(capsys.readouterr().out)[-1])
    assert figures["trace"] == "mine.jsonl"
    assert len(read("mine.jsonl").calls) == figures["operations"]
    assert main(["run", "--json", name]) == 0
    assert json.loads(lines(capsys.readouterr().out)[-1])["trace"] is None
    assert {path.name for path in Path().iterdir()} == {"script.py", "mine.jsonl"}


def test_trace_to_what_is_no_file(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe or a device would have to be renamed: it stays what it is, and one line says that it is no file."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no named pipes")
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in ("pipe", "link"):
            assert main(["run", "--budget", "8kB", "--trace", path, script(CHAIN)]) == 2
            assert f"the trace cannot be written to {path}: it is no file; choose" in capsys.readouterr().err
    finally:
        os.close(reader)
    assert Path("pipe").is_fifo()
    assert Path("link").is_symlink()


def test_trace_through_a_link(script: Script) -> None:
    """A link to a file stays one, and the trace is in the file, whichever cache of the script it is of."""
    Path("link.jsonl").symlink_to("mine.jsonl")
    for text in (CHAIN, "import recompute as rc\nwith rc.Cache():\n    rc.ap(str, 5)\n"):
        assert main(["run", "--budget", "8kB", "--trace", "link.jsonl", script(text)]) == 0
        assert Path("link.jsonl").is_symlink()
        assert read("mine.jsonl").calls
    assert {path.name for path in Path().iterdir()} == {"script.py", "link.jsonl", "mine.jsonl"}


def test_script_that_changes_its_directory(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Recording, trace and page are where the command was given, wherever the script went, even if that is gone."""
    text = "import os, recompute as rc\nos.mkdir('other')\nos.chdir('other')\n"
    for more in ("", "os.rmdir(os.getcwd())\n"):
        name = script(text + more + "with rc.Cache():\n    rc.ap(str, 5)\n")
        here = os.getcwd()
        assert main(["run", "--record", "--report", "--json", name]) == 0
        os.chdir(here)
        written = {path.name.removeprefix("script.") for path in Path().iterdir()} - {"other"}
        assert written == {"py", "recompute.json", "recompute.jsonl.gz", "report.html"}
        assert json.loads(lines(capsys.readouterr().out)[-1])["cache"].startswith(f"{name}:")
        if not more:
            Path("other").rmdir()


def test_other_arguments_are_a_warning(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording made with other arguments still serves, with a warning that names both."""
    name = script(CHAIN)
    main(["run", "--record", name, "20"])
    assert main(["run", "--budget", "50%", name, "21"]) == 0
    assert "recompute: warning: the recording was made with other arguments (20, now 21)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no recording script.recompute.json"),
        ("{", "it is not JSON"),
        ("[]", "not one that this version can read"),
        ('{"format": 99}', "not one that this version can read"),
        ('{"format": 1, "program": "script.py", "args": [], "peak": {"cpu": "much"}}', "not one that this version"),
        ('{"format": 1, "program": "script.py", "args": [], "peak": {"cpu": 0}}', "not one that this version can read"),
        ('{"format": 1, "program": "other.py", "args": [], "peak": {"cpu": 9}}', "is of other.py, not of script.py"),
    ],
)
def test_useless_recording(script: Script, capsys: pytest.CaptureFixture[str], content: str | None, says: str) -> None:
    """A missing, corrupt or foreign recording is one line that names the command which makes one."""
    name = script(CHAIN)
    if content is not None:
        Path("script.recompute.json").write_text(content)
    assert main(["run", "--budget", "25%", name, "a b"]) == 2
    out, err = capsys.readouterr()
    (line,) = lines(err)
    assert out == ""
    assert line.startswith("recompute: error: ")
    assert says in line
    assert line.endswith("make one with: recompute run --record script.py 'a b'")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "12 parsecs"], "budget '12 parsecs' is not a size"),
        (["--budget", "0"], "at least one byte"),
        (["--budget", "-5"], "budget '-5' is not a size"),
        (["--budget", ""], "budget '' is not a size"),
        (["--budget", "x%"], "budget 'x%' is not a size"),
        (["--budget", "0%"], "above 0"),
        (["--budget", "nan%"], "not a size"),
        (["--policy", "best"], "invalid choice: 'best'"),
        (["--search", "best"], "unknown search 'best'"),
        (["--release", "best"], "invalid choice: 'best'"),
        (["--record", "--budget", "5MB"], "leave out one of --record and --budget"),
        (["--record", "--recording", "nowhere/peak.json"], "cannot be written"),
        (["--recording", "peak.json"], "add --record to write it, or a share such as --budget 50% to read it"),
        (["--recording", "peak.json", "--budget", "5MB"], "--recording names a file that this run would neither"),
        (["--recording", "peak.json", "--report"], "add --record"),
        (["--trace", "nowhere/run.jsonl"], "the trace cannot be written to nowhere"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_options(script: Script, capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    """A mistake on the command line is one line and status 2, before the script has begun."""
    assert main(["run", *options, script(CHAIN)]) == 2
    out, err = capsys.readouterr()
    (line,) = lines(err)
    assert out == ""
    assert line.startswith("recompute: error: ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.py"], "there is no script nope.py"),
        (["-m", "no_such_module"], "cannot run no_such_module"),
        (["-m", "email"], "'email' is a package and cannot be directly executed"),
        (["."], "__main__"),
        ([], "script"),
    ],
)
def test_nothing_to_run(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    """A missing script or module is one line and status 2."""
    assert main(["run", *arguments]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert line.startswith("recompute: error: ")
    assert says in line


def test_budget_error_is_one_line(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that is too small is one line that names the operation; --json still prints what happened."""
    assert main(["run", "--budget", "1500", "--json", script(CHAIN)]) == 1
    out, err = capsys.readouterr()
    (line,) = lines(err)
    assert line.startswith("recompute: error: grow (created at ")
    figures = json.loads(out)
    assert figures["status"] == 1
    assert figures["error"].startswith("BudgetError: grow")


def test_impure_function_is_one_line(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """`--verify` finds a function whose second run differs."""
    text = (
        "import itertools, recompute as rc\n"
        "count = itertools.count()\n"
        "def impure(x): return next(count)\n"
        "x = rc.ap(impure, 1)\n"
        "x.evict(); x.get()\n"
    )
    assert main(["run", "--verify", script(text)]) == 1
    (line,) = lines(capsys.readouterr().err)
    assert line.startswith("recompute: error: ")
    assert "impure" in line


def test_exception_shows_the_scripts_own_traceback(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that raises shows exactly the traceback that Python shows."""
    name = script("def fail():\n    raise ValueError('mine')\n\nfail()\n")
    assert main(["run", name]) == 1
    assert capsys.readouterr().err == python(name).stderr


def test_syntax_error_in_the_script(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that cannot be compiled shows what Python shows."""
    name = script("x = = 1\n")
    assert main(["run", name]) == 1
    assert capsys.readouterr().err == python(name).stderr


def test_missing_import_of_the_script_is_its_own_error(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that a script lacks is the script's error, with its traceback."""
    assert main(["run", script("import no_such_module\n")]) == 1
    assert "line 1, in <module>\n    import no_such_module" in capsys.readouterr().err


def test_failed_run_reports_and_is_not_recorded(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """After a failure there is a table of what was done, but no recording."""
    assert main(["run", "--record", script(CHAIN + "1 / 0\n")]) == 1
    err = capsys.readouterr().err
    assert "recompute run script.py: ZeroDivisionError: division by zero" in err
    assert lines(err)[-1].startswith("recompute: error: nothing was recorded: ZeroDivisionError")
    assert [path.name for path in Path().iterdir()] == ["script.py"]


def test_record_of_nothing(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that does not use the cache is told so, and not recorded."""
    assert main(["run", "--record", script("print('hello')\n")]) == 1
    err = capsys.readouterr().err
    assert "recompute: warning: script.py made nothing in a cache" in err
    assert lines(err)[-1] == "recompute: error: nothing was recorded: the cache held nothing"


@pytest.mark.parametrize(
    ("leave", "status", "says"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('gone wrong')", 1, "gone wrong\n"),
        ("raise SystemExit", 0, ""),
    ],
)
def test_exit_status(script: Script, capsys: pytest.CaptureFixture[str], leave: str, status: int, says: str) -> None:
    """The exit status is the script's, and a message goes to stderr."""
    assert main(["run", script(f"import sys\n{leave}\n")]) == status
    assert capsys.readouterr().err.startswith(says)


def test_script_sees_what_python_shows_it(script: Script) -> None:
    """`sys.argv`, `sys.path`, `__file__` and the rest are those of `python script.py args`."""
    name = script(
        "import sys\n"
        "print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__, type(__loader__), sorted(globals()))\n"
        "print(sys.modules['__main__'].__dict__ is globals(), globals()['__builtins__'])\n",
        "folder/script.py",
    )
    arguments = [name, "--budget", "5", "--", "-m", "x"]
    assert python("-m", "recompute", "run", *arguments).stdout == python(*arguments).stdout


def test_module_sees_what_python_shows_it(script: Script) -> None:
    """So does a module, run with -m."""
    script("import sys\nprint(sys.argv, sys.path[0], __name__, __file__, __spec__.name)\n", "package/__main__.py")
    arguments = ["-m", "package", "--json", "a"]
    assert python("-m", "recompute", "run", *arguments).stdout == python(*arguments).stdout


def test_folder_with_a_main(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a `__main__.py` runs, as under Python."""
    script("import helper\nprint(helper.WORD)\n", "folder/__main__.py")
    script("WORD = 'found'\n", "folder/helper.py")
    assert main(["run", "folder"]) == 0
    assert capsys.readouterr().out == "found\n"


def test_module_is_recorded_under_its_name(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Recordings work for modules too."""
    script(CHAIN, "package/train.py")
    assert main(["run", "--budget", "50%", "-m", "package.train"]) == 2
    assert "make one with: recompute run --record -m package.train" in capsys.readouterr().err
    assert main(["run", "--record", "-m", "package.train"]) == 0
    assert main(["run", "--budget", "50%", "-m", "package.train"]) == 0
    assert Path("package.train.recompute.json").exists()


def test_everything_is_as_before_afterwards(script: Script) -> None:
    """The caller's `sys.argv`, `sys.path`, `__main__` and default cache are back after a run."""
    before = sys.argv, sys.path[:], sys.modules["__main__"], recompute.default_cache()
    main(["run", "--budget", "8kB", script("import sys\nsys.path.append('x')\nsys.argv.clear()\n")])
    assert (sys.argv, sys.path, sys.modules["__main__"], recompute.default_cache()) == before


def test_threads_share_the_budget(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads of the script use the same cache, and those that outlive its last line are waited for."""
    text = (
        "import threading\n"
        "import recompute as rc\n"
        "over = threading.Event()\n"
        "def work():\n"
        "    over.wait()\n"
        "    for n in range(5):\n"
        "        rc.ap(str, n).get()\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=work).start()\n"
        "over.set()\n"
    )
    result = python("-m", "recompute", "run", "--budget", "8kB", "--json", script(text))
    assert json.loads(result.stdout)["operations"] == 20
    assert result.returncode == 0


def test_idle_pool_does_not_hang(script: Script) -> None:
    """A pool that is never shut down, whose threads wait forever, does not keep the report from coming."""
    text = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import recompute as rc\n"
        "pool = ThreadPoolExecutor(2)\n"
        "print(pool.submit(lambda: rc.ap(str, 5).get()).result())\n"
    )
    result = python("-m", "recompute", "run", script(text))
    assert (result.returncode, result.stdout) == (0, "5\n")
    assert "threads of the script are still running" in result.stderr


def test_planning_is_no_thread_of_the_script(script: Script) -> None:
    """A round that is being planned when the script ends does not make its figures doubtful."""
    text = (
        "import recompute as rc\n"
        "cache = rc.default_cache()\n"
        "for _ in range(3):\n"
        "    with cache.iteration():\n"
        "        values = [rc.ap(lambda: 0, nbytes=10)]\n"
        "        for _ in range(400):\n"
        "            values.append(rc.ap(lambda x: x + 1, values[-1], nbytes=10))\n"
        "        while values:\n"
        "            last = values.pop().get()\n"
        "print(last, cache.stats().foresight.partition(':')[0])\n"
    )
    result = python("-m", "recompute", "run", "--budget", "500", script(text))
    assert result.returncode == 0
    assert result.stdout.split()[0] == "0"
    assert result.stdout.split()[1] in ("planning", "following")
    assert "threads of the script" not in result.stderr


def in_own_cache(budget: str) -> str:
    """The chain in a cache that the script makes."""
    return f"import recompute as rc\nwith rc.Cache('{budget}'):\n{indent(CHAIN, '    ')}"


def test_own_cache_of_the_script(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a budget on the command line it keeps its own, and is what the report is about."""
    name = script(in_own_cache("8kB"))
    assert main(["run", "--json", name]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(lines(out)[-1])
    assert (figures["budget"], figures["cache"]) == (8000, "script.py:2")
    assert figures["evictions"] > 0
    assert "cache               made at script.py:2" in err
    assert "other caches" not in err
    assert main(["run", script(in_own_cache("1.5kB"))]) == 1
    assert "grow (created at " in capsys.readouterr().err


def test_own_cache_is_recorded(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """`--record` runs it without its budget, and a share of its peak is a budget for it."""
    name = script(in_own_cache("1.5kB"))
    assert main(["run", "--record", "--json", name]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(lines(out)[-1])
    assert (figures["budget"], figures["evictions"]) == (None, 0)
    assert figures["operations"] == 41
    assert "none, instead of the script's own" in err
    assert len(read("script.recompute.jsonl.gz").calls) == 41
    assert json.loads(Path("script.recompute.json").read_text())["peak"] == {"cpu": figures["peak"]}
    assert main(["run", "--budget", "50%", "--json", name]) == 0
    out, err = capsys.readouterr()
    again = json.loads(lines(out)[-1])
    assert again["budget"] == figures["peak"] // 2
    assert again["evictions"] > 0
    assert "(50% of " in err
    assert {path.name for path in Path().iterdir()} == {
        "script.py",
        "script.recompute.json",
        "script.recompute.jsonl.gz",
    }


def test_several_caches_of_the_script(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """The one with the largest peak is recorded; the others are listed, with their traces; unused ones are not."""
    text = (
        "import recompute as rc\n"
        "kept = [rc.ap(str, 5), rc.Cache()]\n"
        "for size in (1000, 5000, 2000):\n"
        "    with rc.Cache('10kB'):\n"
        "        rc.ap(bytes, size).get()\n"
    )
    assert main(["run", "--record", "--json", script(text)]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(lines(out)[-1])
    assert figures["cache"] == "script.py:4"
    assert 5000 <= figures["peak"] < 6000
    assert "covers only the cache with the largest peak" in err
    table = err.partition("other caches")[2]
    assert table.count("script.py:4") == 2
    assert "the default one" in table
    traces = ["script.recompute.jsonl.gz", *(f"script.{number}.recompute.jsonl.gz" for number in (2, 3, 4))]
    assert [read(trace).calls[0].name for trace in traces] == ["bytes", "bytes", "bytes", "str"]
    assert {Path(trace).read_bytes()[:2] for trace in traces} == {b"\x1f\x8b"}, "compressed, as their names say"
    assert {path.name for path in Path().iterdir()} == {"script.py", "script.recompute.json", *traces}


def test_too_many_caches_of_the_script(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """No more than some are followed; the report says how many were not."""
    text = "import recompute as rc\nfor number in range(30):\n    with rc.Cache():\n        rc.ap(str, number)\n"
    assert main(["run", "--record", script(text)]) == 0
    assert "script.py made 14 more caches, which were not observed" in capsys.readouterr().err


def test_cache_of_a_simulation_is_none_of_the_scripts(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """What the script simulates happens in no cache that is recorded."""
    assert main(["run", "--record", script(CHAIN)]) == 0
    text = (
        "import recompute as rc\n"
        "program = rc.traces.read('script.recompute.jsonl.gz')\n"
        "print(rc.simulator.simulate(program, of_peak=0.5).overhead >= 1)\n"
    )
    capsys.readouterr()
    assert main(["run", script(text, "other.py")]) == 0
    out, err = capsys.readouterr()
    assert out == "True\n"
    assert "other.py made nothing in a cache" in err


THRASHING = """\
import recompute as rc

def work(x, n):
    return bytes(sum(range(20_000)) * 0 + 1000)

values = [rc.pure(bytes(1000))]
for n in range(20):
    values.append(rc.ap(work, values[-1], n))
for _ in range(10):
    for value in values:
        value.get()
"""


def test_hint_where_most_is_repeated(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """The share, what cannot be evicted, and the command that shows which budget is enough; nothing without need."""
    assert main(["run", "--budget", "4.5kB", script(THRASHING)]) == 0
    (line,) = [line for line in lines(capsys.readouterr().err) if line.startswith("recompute: hint: ")]
    assert "% of the compute was repeated" in line
    assert "1.03 kB of sources cannot be evicted" in line
    assert "recompute run --record script.py" in line
    assert main(["run", script(THRASHING)]) == 0
    err = capsys.readouterr().err
    assert "was repeated" not in err
    assert "hint: to see what less memory costs, record it: recompute run --record script.py" in err
    assert "resident at peak" in err
    table = [line.split()[0] for line in lines(err) if line.startswith("  ")]
    assert table.index("wall") == table.index("overhead") + 1


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_narrow_terminals_break_no_word(script: Script, columns: int) -> None:
    """Whatever the width of the terminal, names and figures are whole."""
    shown, status = in_terminal("run", "--budget", "8kB", script(CHAIN), until="overhead", columns=columns)
    assert status == 0
    for word in ("rematerializations", "operations", "overshoot", "recomputed", "grow"):
        assert word in shown
    report = shown.partition("recompute run script.py")[2]
    assert all(len(line) <= max(columns, 20) for line in lines(report))


def test_errors_in_a_narrow_terminal(script: Script) -> None:
    """An error goes on in the next line, and is whole there."""
    shown, status = in_terminal("run", "--budget", "12 parsecs", script(CHAIN), until="error", columns=40)
    assert status == 2
    assert len(lines(shown)) > 1
    assert all(len(line) <= 40 for line in lines(shown))
    assert "recompute: error: budget '12 parsecs' is not a size" in " ".join(shown.split())


def test_doctor_in_a_narrow_terminal() -> None:
    """No name of a package is broken, and a command that is too long goes on below itself."""
    shown, _ = in_terminal("doctor", until="recompute_numpy", columns=40)
    for word in ("recompute_numpy:adapter", "matplotlib", "hypothesis"):
        assert word in shown


def test_interrupt_reports_so_far(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with the table so far and status 130, without a traceback."""
    assert main(["run", script(CHAIN + "import signal\nsignal.raise_signal(signal.SIGINT)\n")]) == 130
    err = capsys.readouterr().err
    assert lines(err)[0] == "recompute run script.py: interrupted"
    assert "Traceback" not in err


def test_interrupt_in_a_destructor_is_not_lost(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A Ctrl-C that falls into a destructor, where Python ignores it, still ends the run."""
    text = (
        "import signal\n"
        "class Late:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "Late()\n"
        "while True: pass\n"
    )
    assert main(["run", script(text)]) == 130
    assert "Exception ignored" not in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
@pytest.mark.parametrize("command", [["run", "script.py"], ["run", "--json", "script.py"]])
def test_broken_pipe_is_quiet(script: Script, command: list[str]) -> None:
    """When whoever reads stdout has gone, there is no traceback."""
    script(CHAIN + "while True:\n    print('more' * 1000, flush=True)\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "recompute", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait() == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert "recompute run script.py: broken pipe" in err


def test_pipe_of_the_scripts_own_is_its_error(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """A BrokenPipeError that has nothing to do with stdout is the script's error."""
    assert main(["run", script("raise BrokenPipeError('mine')\n")]) == 1
    assert "BrokenPipeError: mine" in capsys.readouterr().err


def test_stderr_that_is_no_terminal_gets_nothing_live(script: Script) -> None:
    """Without a terminal, stderr holds what the script wrote, then the plain table, and no control characters."""
    result = python("-m", "recompute", "run", script(CHAIN + "print('mine', file=sys.stderr)\n"))
    first, second, *_ = lines(result.stderr)
    assert (first, second) == ("mine", "recompute run script.py")
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr


def in_terminal(*command: str, until: str, colour: bool = False, columns: int = 80) -> tuple[str, int]:
    """Run a command in a terminal, press Enter when `until` is shown; all that was shown, and the exit status."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    termios = pytest.importorskip("termios", reason="no terminals of this kind on this system")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "" if colour else "1"}
    terminal, ours = pty.openpty()
    termios.tcsetwinsize(ours, (24, columns))
    started = [sys.executable, "-m", "recompute", *command]
    process = subprocess.Popen(started, env=environment, stdin=ours, stdout=ours, stderr=ours, start_new_session=True)
    os.close(ours)
    shown, pressed = "", False
    while True:
        try:
            piece = os.read(terminal, 65536).decode()
        except OSError:  # Linux: the other side has closed
            piece = ""
        if not piece:
            break
        shown += piece
        if until in shown and not pressed:
            pressed = True
            os.write(terminal, b"\n")
    os.close(terminal)
    return shown, process.wait()


BUSY = """\
import sys, threading
import recompute as rc
pressed = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), pressed.set())).start()
print("started")
while not pressed.is_set():
    rc.ap(str, 5)
print("stopped")
"""


@pytest.mark.parametrize("colour", [True, False])
def test_live_line_on_a_terminal(script: Script, colour: bool) -> None:
    """On a terminal long work shows a line, which is gone before the script's next line appears."""
    shown, status = in_terminal("run", "--budget", "8kB", script(BUSY), until="evictions", colour=colour)
    assert status == 0
    assert "8 kB" in shown
    assert "overhead 1.00" in shown
    before, stopped, table = shown.partition("stopped\r\n")
    assert stopped
    assert before.endswith("\r")
    assert before.rsplit("\r", 2)[-2].strip(" ") == ""
    assert "recompute run script.py" in table
    assert ("\x1b[" in shown) == colour


def test_live_line_leaves_an_open_line_alone(script: Script) -> None:
    """While the script's own last line is open, such as a prompt, nothing is drawn over it."""
    text = CHAIN + "print('name? ', end='', flush=True)\nprint('hello', input())\n"
    shown, status = in_terminal("run", script(text), until="name? ")
    assert status == 0
    assert "answer 1000\r\nname? " in shown
    assert "hello" in shown


def test_live_line_does_nothing_without_a_terminal() -> None:
    """Nothing is hooked and nothing is drawn where nobody watches."""
    write = sys.stdout.write
    with Live(lambda: ["text"], wait=0.0, every=0.0):
        assert sys.stdout.write == write


def test_live_line_fits() -> None:
    """Parts that do not fit are left out from the right, and a single one is cut."""
    assert fit(["one", "two", "three"], 80) == "one  two  three"
    assert fit(["one", "two", "three"], 10) == "one  two"
    assert fit(["one", "two"], 2) == "on"
    assert fit([], 10) == ""


def test_durations_for_people() -> None:
    """Times are shown in a unit that suits them."""
    shown = [seconds(time) for time in (0, 2e-6, 0.0125, 1.5, 90, 125, 7260)]
    assert shown == ["0 s", "2 us", "12.5 ms", "1.5 s", "90 s", "2 min 5 s", "2 h 1 min"]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` and `--help` answer on stdout with status 0, and every command's help has examples."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"recompute {recompute.__version__}\npython 3.")
    for command in ([], ["run"], ["demo"], ["doctor"]):
        assert main([*command, "--help"]) == 0
        assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_unknown_command(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """No command, or an unknown one, is one line that names the commands or their help."""
    assert main(arguments) == 2
    (line,) = lines(capsys.readouterr().err)
    assert line.startswith("recompute: error: ")
    assert "--help" in line


def test_interrupted_process_ends_with_130(script: Script) -> None:
    """A real SIGINT from outside ends the process as described."""
    if os.name == "nt":
        pytest.skip("signals are another matter there")
    name = script(CHAIN + "print('ready', flush=True)\nwhile True:\n    rc.ap(str, 5)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "recompute", "run", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            pass
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "recompute run script.py: interrupted" in err
    assert "Traceback" not in err


SLOW = """\
import time
import recompute as rc

def made(n):
    time.sleep(0.05)
    return bytes([n]) * 1_000_000

values = [rc.ap(made, n) for n in range(6)]
for _ in range(2):
    assert [value.get()[0] for value in values] == list(range(6))
with rc.Cache("1GB") as own:
    sources = [rc.pure(bytes(1_000_000)) for _ in range(6)]
    print(sum(source.resident for source in sources))
"""


def test_disk(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """What is dear to compute moves, and so do sources of a cache of the script's own; the report tells of the disk."""
    assert main(["run", "--budget", "3.5MB", "--disk", "100MB", "--json", script(SLOW)]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out.splitlines()[-1])
    (disk,) = figures["tiers"]
    assert out.splitlines()[0] == "3"
    assert (disk["tier"], disk["limit"]) == ("disk", 100_000_000)
    assert disk["moves"] >= 3
    assert disk["fetches"] >= 3
    assert figures["rematerializations"] == 0
    assert "bandwidth" in err


def test_a_disk_in_front_of_the_script(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is taken for the size, and the error says so and what to do."""
    name = script("print(1)")
    for more in ([], ["--epochs", "3"], ["other.py"]):
        assert main(["run", "--disk", name, *more]) == 2
        (line,) = lines(capsys.readouterr().err)
        assert f"{name!r} is not a size" in line
        assert "--disk without a size needs another option behind it" in line


def test_a_disk_of_no_size(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert main(["run", "--budget", "3MB", "--disk", "many", script("print(1)")]) == 2
    assert "the size of the disk 'many' is not a size" in capsys.readouterr().err
