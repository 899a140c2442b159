"""The demo of two texts: its edits against a plain table, and the same ones within any budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_demos.edits import ADD, KEEP, REMOVE, REPLACE, demo, edits, encode, longest_kept  # noqa: E402

TEXTS = st.text(alphabet="abc", max_size=30)


def distance(text: str, other: str) -> int:
    """The textbook's table, cell by cell."""
    above = list(range(len(other) + 1))
    for row, letter in enumerate(text, start=1):
        here = [row]
        for column, wanted in enumerate(other, start=1):
            here.append(min(above[column - 1] + (letter != wanted), above[column] + 1, here[-1] + 1))
        above = here
    return above[-1]


def applied(script: str, text: str, other: str) -> str:
    """What the script makes of `text`, with the letters that it needs from `other`. Keeps only what is equal."""
    old, new, made = iter(text), iter(other), []
    for edit in script:
        before = next(old) if edit != ADD else None
        if edit != REMOVE:
            made.append(next(new))
        if edit == KEEP:
            assert before == made[-1]
    assert next(old, None) is None
    return "".join(made)


@given(TEXTS.filter(bool), TEXTS, st.data())
def test_edits_are_right_and_no_fewer_would_do(text: str, other: str, data: st.DataObject) -> None:
    """The script makes one text from the other with as many edits as the distance, however the table is cut."""
    blocks = data.draw(st.integers(1, len(text)))
    with rc.Cache():
        script = edits(encode(text), encode(other), blocks=blocks)
    assert applied(script, text, other) == other
    assert sum(script.count(kind) for kind in (REPLACE, REMOVE, ADD)) == distance(text, other)


@given(TEXTS.filter(lambda text: len(text) > 8), TEXTS.filter(bool))
def test_a_budget_changes_nothing(text: str, other: str) -> None:
    """Within the least budget that a row of blocks fits into, the script is the same, and the budget holds."""
    with rc.Cache():
        expected = edits(encode(text), encode(other), blocks=len(text))
    budget = 5 * 2 * len(other)
    with rc.Cache(budget=budget) as cache:
        assert expected == edits(encode(text), encode(other), blocks=len(text))
    assert cache.stats().peak <= budget
    assert cache.stats().rematerializations > 0


@pytest.mark.parametrize(
    ("script", "passage"), [("==+===~==", "cde"), ("-===", "bcd"), ("~~~", ""), ("", ""), ("+++==-=", "ab")]
)
def test_longest_passage(script: str, passage: str) -> None:
    """The longest run of kept letters, found in the first text: letters that are added are none of its own."""
    assert passage == longest_kept("abcdefghi", script)


def small_modules(folder: Path) -> tuple[ModuleType, ModuleType]:
    """Two modules of a few hundred letters."""
    modules = []
    for name, text in (("first", "number = 1\n" * 40), ("second", "numbers = 12\n" * 30)):
        path = folder / f"{name}.py"
        path.write_text(text)
        module = ModuleType(name)
        module.__file__ = str(path)
        modules.append(module)
    return modules[0], modules[1]


def test_demo_reports_and_draws(tmp_path: Path) -> None:
    """The demo compares two runs, says so in lines to read, and draws the second one."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    said: list[str] = []
    shares: list[float] = []
    figures = demo(
        budget=0.3,
        blocks=20,
        texts=small_modules(tmp_path),
        picture=tmp_path / "picture.png",
        echo=said.append,
        progress=lambda text, share: shares.append(share),
    )
    assert figures["edits_equal"]
    assert figures["budget_peak_bytes"] <= figures["budget_bytes"] < figures["peak_bytes"]
    assert figures["rematerializations"] > 0
    assert json.loads(json.dumps(figures)) == figures
    assert any("the same, edit for edit" in line for line in said)
    assert said[-1] == f"picture             {tmp_path / 'picture.png'}"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"budget": 1.5}, {"blocks": 1}, {"blocks": 10_000}])
def test_wrong_arguments(tmp_path: Path, wrong: dict[str, float]) -> None:
    """A budget that is no fraction, and more blocks than letters, are named before anything is computed."""
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
        demo(texts=small_modules(tmp_path), picture=None, echo=pytest.fail, **wrong)  # type: ignore[arg-type]


def test_no_folder_for_the_picture(tmp_path: Path) -> None:
    """A picture that cannot be saved is an error before anything is computed."""
    with pytest.raises(FileNotFoundError, match="no directory"):
        demo(texts=small_modules(tmp_path), picture=tmp_path / "nowhere" / "picture.png", echo=pytest.fail)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib there are figures, and a line that says how to get a picture."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    figures = demo(blocks=20, budget=0.3, texts=small_modules(tmp_path), picture=tmp_path / "a.png", echo=said.append)
    assert figures["picture"] is None
    assert "pip install '.[plot]' in a checkout" in said[-1]
