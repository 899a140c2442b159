"""The demonstration: its mathematics against a loop over the letters, and the same bits within any budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_demos import letters as demonstration  # noqa: E402  # after importorskip
from recompute_demos.letters import (  # noqa: E402
    ALPHABET,
    Expectation,
    Model,
    demo,
    encode,
    expect,
    fit,
    letters_only,
    maximize,
    random_model,
    read,
)

TEXTS = st.text(alphabet=ALPHABET, min_size=1, max_size=80)
SEEDS = st.integers(0, 2**32 - 1)
BUDGET = 5_000  # bytes: of 64 blocks of about 30 letters, nine are in memory at a time


def by_letter(letters: Any, model: Model) -> Expectation:
    """The same as `expect`, a letter at a time, every message kept."""
    alphas = [np.array([0.5, 0.5])]
    log_likelihood = 0.0
    for letter in letters:
        alpha = alphas[-1] @ model.transition * model.emission[:, letter]
        log_likelihood += float(np.log(alpha.sum()))
        alphas.append(alpha / alpha.sum())
    beta = np.ones(2)
    posteriors, transitions = [], np.zeros((2, 2))
    for before, letter in zip(alphas[-2::-1], letters[::-1], strict=True):
        onward = model.emission[:, letter] * beta
        joint = before[:, None] * model.transition * onward
        joint /= joint.sum()
        transitions += joint
        posteriors.append(joint.sum(0))
        beta = model.transition @ onward
        beta /= beta.sum()
    return Expectation(np.array(posteriors[::-1]).T, transitions, log_likelihood)


@pytest.fixture(scope="module")
def english() -> Any:
    """Some two thousand letters."""
    return encode(read()[:2_000])


def test_text_is_folded_to_27_symbols() -> None:
    """Case is ignored, and any run of other characters is one space."""
    assert letters_only("It's  1980,\nŒuvre!") == "it s uvre "
    assert encode("az ").tolist() == [0, 25, 26]
    assert set(read()) == set(ALPHABET)
    assert "  " not in read()


@given(TEXTS, SEEDS, st.data())
def test_blocks_and_scans_give_what_a_loop_over_the_letters_gives(text: str, seed: int, data: st.DataObject) -> None:
    """Posteriors, expected transitions and likelihood agree with the textbook, however the text is cut."""
    letters, model = encode(text), random_model(seed)
    with rc.Cache():
        found = expect(letters, model, blocks=data.draw(st.integers(1, len(letters))))
    expected = by_letter(letters, model)
    np.testing.assert_allclose(found.posteriors, expected.posteriors, rtol=1e-9)
    np.testing.assert_allclose(found.transitions, expected.transitions, rtol=1e-9)
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-9)


def test_nothing_underflows_under_a_model_that_hardly_expects_the_text() -> None:
    """Letters of probability 1e-12 for thousands of steps leave finite and correct figures."""
    emission = np.full((2, 27), 1e-12)
    emission[:, 0] = 1 - 26e-12
    emission[1, 1] = 1e-6
    model = Model(np.array([[1 - 1e-12, 1e-12], [1e-12, 1 - 1e-12]]), emission)
    letters = encode("b" * 1_000 + "c" * 1_000)
    with rc.Cache():
        found = expect(letters, model, blocks=3)
    expected = by_letter(letters, model)
    np.testing.assert_allclose(found.posteriors, expected.posteriors, rtol=1e-6, atol=1e-12)
    assert found.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-9)


def test_a_step_of_the_fit_counts_what_was_expected(english: Any) -> None:
    """The new model's rows are the expected shares of letters and transitions."""
    with rc.Cache():
        found = expect(english, random_model(), blocks=4)
    model = maximize(english, found)
    letter_e = ALPHABET.index("e")
    share = found.posteriors[:, english == letter_e].sum(1) / found.posteriors.sum(1)
    np.testing.assert_allclose(model.emission[:, letter_e], share, rtol=1e-9)
    np.testing.assert_allclose(model.transition, found.transitions / found.transitions.sum(1, keepdims=True), rtol=1e-9)
    np.testing.assert_allclose([model.emission.sum(1), model.transition.sum(1)], 1, rtol=1e-12)


def test_the_likelihood_never_falls(english: Any) -> None:
    """Each iteration of Baum and Welch explains the text better than the one before."""
    model, likelihoods = random_model(), []
    with rc.Cache():
        for _ in range(12):
            found = expect(english, model, blocks=8)
            likelihoods.append(found.log_likelihood)
            model = maximize(english, found)
    assert likelihoods == sorted(likelihoods)


@pytest.mark.parametrize("policy", ["dtr-eq", "dtr", "lru", "random"])
def test_a_budget_changes_no_bit(english: Any, policy: str) -> None:
    """Within a seventh of the memory the fitted model and all posteriors are the same bits, and the budget holds."""
    with rc.Cache() as free:
        model = fit(english, random_model(), iterations=3, blocks=64)
        expected = expect(english, model, blocks=64)
    with rc.Cache(BUDGET, policy=policy) as tight:
        same = fit(english, random_model(), iterations=3, blocks=64)
        found = expect(english, same, blocks=64)
    assert free.stats().peak > 6 * BUDGET
    assert tight.stats().peak <= BUDGET
    assert tight.stats().rematerializations > 0
    assert found.posteriors.tobytes() == expected.posteriors.tobytes()
    assert found.log_likelihood == expected.log_likelihood
    assert [part.tobytes() for part in same] == [part.tobytes() for part in model]


def test_nothing_stays_in_the_cache(english: Any) -> None:
    """After a pass over the text the cache is empty."""
    with rc.Cache(BUDGET) as cache:
        expect(english, random_model(), blocks=64)
    assert cache.stats().used == 0


def test_the_states_become_vowels_and_consonants() -> None:
    """On the first sixth of the real text one state writes the vowels and the space, the other the consonants."""
    letters = encode(read()[:60_000])
    with rc.Cache():
        model = fit(letters, random_model(), iterations=60, blocks=8)
    vowels, consonants = demonstration._states(model)
    assert set("aeiou ") <= set(vowels)
    assert set("bcdfjklmnpqrstvwxz") <= set(consonants)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration reads two thousand letters."""
    text = read()[:2_000]
    monkeypatch.setattr(demonstration, "read", lambda: text)


@pytest.mark.usefixtures("_short")
def test_the_demonstration_reports_what_it_found(tmp_path: Path) -> None:
    """It prints the states, compares both runs, keeps to its budget, draws a picture, and returns plain figures."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    said: list[str] = []
    done: list[str] = []
    picture = tmp_path / "picture.png"
    figures = demo(
        budget=0.2,
        iterations=2,
        blocks=50,
        picture=picture,
        echo=said.append,
        progress=lambda text, share: done.append(text),
    )
    assert json.loads(json.dumps(figures)) == figures
    assert figures["posteriors_equal"] is True
    assert sorted("".join(figures["states"])) == sorted(ALPHABET)
    assert figures["text_letters"] == 2_000
    assert figures["peak_bytes"] == 2 * 8 * (2_000 + 50)
    assert figures["budget_peak_bytes"] <= figures["budget_bytes"] <= 0.2 * figures["peak_bytes"]
    assert figures["rematerializations"] > 0
    assert figures["overhead"] > 1
    assert figures["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = "\n".join(said)
    assert "equal to the last bit" in report
    assert " ".join(figures["states"][0].replace(" ", "_")) in report
    assert str(picture) in report
    assert len(done) == 2 * (2 + 1)


@pytest.mark.usefixtures("_short")
def test_the_demonstration_does_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without matplotlib it says how to get it and returns the figures all the same."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    figures = demo(budget=0.5, iterations=1, blocks=20, picture=tmp_path / "none.png", echo=said.append)
    assert figures["picture"] is None
    assert "pip install '.[plot]' in a checkout" in said[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_short")
def test_a_picture_that_cannot_be_written_costs_no_figures(tmp_path: Path) -> None:
    """A missing directory is an error before any work; an unknown format is mentioned and the figures come back."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    done: list[str] = []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        demo(
            picture=tmp_path / "nowhere" / "picture.png",
            echo=done.append,
            progress=lambda text, share: done.append(text),
        )
    assert done == []
    figures = demo(budget=0.5, iterations=1, blocks=20, picture=tmp_path / "picture.xyz", echo=done.append)
    assert figures["picture"] is None
    assert "xyz" in done[-1]


@pytest.mark.usefixtures("_short")
def test_a_difference_would_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the two runs differ in one bit, the report says so."""
    real = demonstration.expect

    def slightly_wrong(*args: Any, **kwargs: Any) -> Expectation:
        found = real(*args, **kwargs)
        if rc.current_cache().budget is not None:
            found.posteriors[0, 0] = np.nextafter(found.posteriors[0, 0], 1)
        return found

    monkeypatch.setattr(demonstration, "expect", slightly_wrong)
    said: list[str] = []
    figures = demo(budget=0.5, iterations=1, blocks=20, picture=None, echo=said.append)
    assert figures["posteriors_equal"] is False
    assert any("NOT EQUAL" in line for line in said)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"budget": 0.0}, ValueError),
        ({"budget": 1.5}, ValueError),
        ({"iterations": 0}, ValueError),
        ({"blocks": 1}, ValueError),
        ({"blocks": 2_001}, ValueError),
        ({"budget": 0.01, "blocks": 20, "iterations": 1}, rc.BudgetError),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    """Shares, counts and budgets that make no sense are errors that name the argument, or the budget."""
    with pytest.raises(error, match=next(iter(arguments))):
        demo(picture=None, echo=lambda line: None, **arguments)
