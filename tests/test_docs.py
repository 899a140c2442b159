"""The documentation is true: its code runs and prints what it says, its links resolve, and it leaves nothing out."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import recompute as rc
from recompute import _form as form
from recompute import testing
from recompute.testing.conformance import registered

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_numpy import adapter as numpy_adapter  # noqa: E402  # after importorskip

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CI = ROOT / ".ci" / "run"
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documentation is not beside the tests")


NEEDS = {
    "docs/jax.md": "jax",
    "docs/language_model.md": "equinox",
    "docs/long_scan.md": "jax",
    "docs/ensemble.md": "jax",
    "docs/torch.md": "torch",
}
"""Pages whose examples need more than the extra `test`."""
SLOW = {"docs/tutorial.md"}
"""Pages that a plain run leaves out."""
MARK = re.compile(r"<!-- needs: (\w+) -->")
"""In the line before a block: what it needs, in a page of which the other blocks run without that."""

WIDTH = 87
"""Columns of a code block that the site shows without scrolling."""
WIDE = {
    "docs/budget_cost.md": "the story of a value, which prints an event as a line",
    "docs/jax.md": "a plan, which prints a compilation as a line",
    "docs/torch.md": "what a step needs, which prints its parts as a line",
}
"""Pages with output of the library that is wider, as the library prints it."""

PLAIN = "<!-- form: plain -->"
"""In the line before a block that runs in the plain form only; CI runs it there."""


class Block(NamedTuple):
    """A fenced block: its language, the number of its first line (from 0), its text, what it alone needs."""

    language: str
    line: int
    text: str
    needs: str = ""
    plain: bool = False


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = text.splitlines(keepends=True)
    start = None
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start = number
            else:
                language = lines[start].removeprefix("```").strip()
                mark = MARK.match(lines[start - 1]) if start else None
                plain = start > 0 and lines[start - 1].strip() == PLAIN
                needs = mark[1] if mark else ""
                found.append(Block(language, start + 1, "".join(lines[start + 1 : number]), needs, plain))
                start = None
    assert start is None, f"the fence in line {start} is not closed"
    return found


def examples(text: str) -> list[tuple[Block, str | None]]:
    """The Python blocks with the output that they must print: a `text` block that follows with a blank line between."""
    found = blocks(text)
    lines = text.splitlines()
    pairs: list[tuple[Block, str | None]] = []
    for number, block in enumerate(found):
        if block.language == "python":
            end = block.line + len(block.text.splitlines())
            after = found[number + 1] if number + 1 < len(found) else None
            follows = after is not None and after.language == "text" and not "".join(lines[end + 1 : after.line - 1])
            pairs.append((block, after.text if after is not None and follows else None))
    return pairs


def programs() -> list[Any]:
    """Each page with examples, and what they need: all blocks of a page that need the same are one program."""
    found = [(page, block.needs) for page in PAGES for block, _ in examples(page.read_text(encoding="utf-8"))]
    marks = {program: [pytest.mark.slow] if name(program[0]) in SLOW else [] for program in found}
    return [
        pytest.param(page, needs, marks=marks[page, needs], id=f"{name(page)} with {needs}" if needs else name(page))
        for page, needs in dict.fromkeys(found)
    ]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """The fragment by which a heading is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.fixture
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory, a new default cache, and NumPy's adapter whether or not the package is installed."""
    monkeypatch.chdir(tmp_path)
    with registered(numpy_adapter, np.ndarray, np.generic):
        if find_spec("jax"):
            _register_jax()
        rc.set_default_cache(None)
        logger = logging.getLogger("recompute")
        handlers, level = logger.handlers[:], logger.level
        yield
        logger.handlers[:] = handlers
        logger.setLevel(level)
        rc.set_default_cache(None)


def _register_jax() -> None:
    import jax

    import recompute_jax

    rc.adapters.register(type(jax.numpy.zeros(())), recompute_jax.adapter)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("page", "needs"), programs())
def test_examples(page: Path, needs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block runs, after those of its page that need the same, and prints what the `text` after it says."""
    for package in filter(None, (needs, NEEDS.get(name(page)))):
        pytest.importorskip(package, reason=f"the extra {package!r} is not installed")
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", rc.ThrashWarning)  # some pages show budgets that are too small
        for block, expected in examples(page.read_text(encoding="utf-8")):
            if block.needs != needs or (block.plain and form.name() == "compiled"):
                continue
            code = compile("\n" * block.line + block.text, name(page), "exec")  # tracebacks show the line of the page
            exec(code, program.__dict__)
            printed = capsys.readouterr().out
            if expected is not None:
                assert expected == printed, f"{name(page)}, line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_output_follows_its_example(page: Path) -> None:
    """A `text` block is the output of the Python block before it, so that none goes unchecked."""
    text = page.read_text(encoding="utf-8")
    outputs = [block for block in blocks(text) if block.language == "text"]
    assert len(outputs) == sum(expected is not None for _, expected in examples(text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_narrow(page: Path) -> None:
    """No code block is wider than the site shows; of output only what is listed, and that is."""
    wide: dict[str, list[str]] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        wide.setdefault(block.language, []).extend(line for line in block.text.splitlines() if len(line) > WIDTH)
    output = wide.pop("text", []) + wide.pop("", [])
    assert [line for lines in wide.values() for line in lines] == []
    assert bool(output) == (name(page) in WIDE), output


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    """Every relative link and every image leads to a file, and every fragment to a heading."""
    text = prose(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name(page)} links to {target}"
        assert found.is_relative_to(ROOT), f"{name(page)} links to {target}, outside of the repository"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", prose(found.read_text(encoding="utf-8")), flags=re.MULTILINE)
            assert fragment in map(anchor, headings), f"{name(page)} links to {target}"


def test_every_page_is_on_the_map() -> None:
    """`docs/index.md` links to every other page; the results have a list of their own."""
    index = ROOT / "docs" / "index.md"
    results = ROOT / "docs" / "results"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text(encoding="utf-8"))
    }
    here = {page for page in PAGES if page.parent != results or page.name == "README.md"} - {index, ROOT / "README.md"}
    assert here <= linked, f"not on the map: {sorted(map(name, here - linked))}"


def test_everything() -> None:
    """`docs/everything.md` names all that is public: of the library, of a value, of a cache, of the testing kit."""
    text = (ROOT / "docs" / "everything.md").read_text(encoding="utf-8")
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    public = [*rc.__all__, *testing.__all__]
    for cls in (rc.Recomputable, rc.Cache, rc.Stats, rc.adapters.Adapter):
        public += [attribute for attribute in vars(cls) if not attribute.startswith("_")]
    assert [public_name for public_name in public if not re.search(rf"\b{re.escape(public_name)}\b", code)] == []


def test_every_extra_is_documented() -> None:
    """Each extra is on the page on installing, `all` has what goes together, and no place to download from is named."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert [extra for extra in extras if f"`{extra}`" not in table] == []
    (everything,) = extras["all"]
    apart = {"all", "cupy", "trainers", "test", "docs", "dev"}
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == {*extras} - apart
    assert not re.search(r"index-url|find-links|download\.", text)


@pytest.mark.skipif(not CI.exists(), reason="the continuous integration is not beside the tests")
def test_commands() -> None:
    """The README has two commands, and these are what `.ci/run` executes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [block.text for block in blocks(readme) if block.language == "sh"]
    assert shown == [
        'python -m pip install ".[numpy,plot,cli]" && recompute demo\n',
        'python -m pip install ".[test]" && python -m pytest -n 2\n',
    ]
    run = subprocess.run([str(CI), "--commands"], capture_output=True, text=True, check=True)
    assert "".join(shown) == run.stdout
    script = CI.read_text(encoding="utf-8")
    assert 'eval "${commands[0]} ' in script
    assert 'eval "${commands[1]} ' in script


def test_blocks() -> None:
    """The checker itself: what it takes for an example, and for its output."""
    page = "```python\na\n```\n\n```text\nb\n```\n\n```python\nc\n```\nprose\n\n```text\nd\n```\n"
    assert [(block.text, expected) for block, expected in examples(page)] == [("a\n", "b\n"), ("c\n", None)]
