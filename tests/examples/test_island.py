"""The island example: its posteriors against enumeration and hmmlearn, its counts against the bounds, its report."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from math import inf, log2
from pathlib import Path
from typing import Any

import pytest
from example_scripts import assert_refused, example
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._plans.chains import forward_runs

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_demos.letters import Model, encode, fit, random_model, read  # noqa: E402  # after importorskip

island = example("island")

TOLERANCE = 1e-11  # absolute; 3e-13 was found. hmmlearn adds logarithms, the script divides by sums
POLICIES = ["needed", "dtr-eq", "dtr", "msps", "lru", "random"]


def within(budget: int | None, chain: Any, parts: Any, policy: str = "needed") -> tuple[Any, rc.Stats]:
    """Posteriors by letter, and what the cache did."""
    with rc.Cache(budget, policy=policy, clock=chain.clock) as cache:
        found = np.concatenate([*island.posteriors(chain, parts)][::-1])
    return found, cache.stats()


def by_enumeration(model: Model, letters: Any) -> Any:
    """The posteriors by their definition: the probability of each path of states, added up."""
    states = len(model.transition)
    first = np.full(states, 1 / states) @ model.transition
    found = np.zeros((len(letters), states))
    for path in itertools.product(range(states), repeat=len(letters)):
        moves = [first[path[0]], *(model.transition[pair] for pair in itertools.pairwise(path))]
        emitted = model.emission[list(path), letters]
        found[np.arange(len(letters)), path] += np.prod(moves) * np.prod(emitted)
    return found / found.sum(1, keepdims=True)


def fewest_steps(n: int, slots: int) -> float:
    """By exhaustive search: messages 1 to n are delivered, last first; 0 is the start, which takes no room."""
    best = {((), n): 0}
    queue: list[tuple[int, tuple[int, ...], int]] = [(0, (), n)]
    while queue:
        steps, held, wanted = heapq.heappop(queue)
        if not wanted:
            return steps
        after = [(steps, tuple(message for message in held if message != gone), wanted) for gone in held]
        if wanted in held:
            after = [(steps, held[:-1], wanted - 1)]  # what lies beyond is of no use any more
        elif len(held) < slots:
            made = {message + 1 for message in (0, *held)} - {*held}
            after += [(steps + 1, tuple(sorted({*held, message})), wanted) for message in made if message <= wanted]
        for state in after:
            if state[0] < best.get(state[1:], inf):
                best[state[1:]] = state[0]
                heapq.heappush(queue, state)
    raise AssertionError("there is always a way")


@pytest.fixture(scope="module")
def english() -> Any:
    """A thousand letters, and a model fitted to them."""
    letters = encode(read()[:1024])
    with rc.Cache():
        return letters, fit(letters, random_model(), iterations=20, blocks=2)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Model, Any, int]:
    """A model of one to three states, up to six letters, and the letters of a block."""
    states = draw(st.integers(1, 3))
    letters = draw(st.lists(st.integers(0, 26), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [random.uniform(0.01, 1, (states, columns)) for columns in (states, 27)]
    model = Model(*(row / row.sum(1, keepdims=True) for row in rows))
    return model, np.array(letters, np.uint8), draw(st.integers(1, len(letters)))


@given(problems(), st.integers(2, 8), st.sampled_from(POLICIES))
def test_posteriors_are_those_of_enumeration(problem: Any, slots: int, policy: str) -> None:
    """For any small model, text, block, budget and policy; and the algorithm by hand gives the same bits."""
    model, letters, block = problem
    parts = island.cut(letters, block)
    chain = island.Chain(model)
    found, stats = within(chain.nbytes(slots * block), chain, parts, policy)
    assert stats.peak <= chain.nbytes(slots * block)
    assert stats.overshoot == 0
    np.testing.assert_allclose(found, by_enumeration(model, letters), rtol=0, atol=1e-12)
    by_hand = [*island.island(island.Chain(model), parts, [1])][::-1]
    assert np.concatenate(by_hand).tobytes() == found.tobytes()


@pytest.mark.parametrize("block", [1, 16])
def test_posteriors_are_those_of_hmmlearn(english: Any, block: int) -> None:
    """Within log2 of the memory the posteriors are those of an independent implementation."""
    hmm = pytest.importorskip("hmmlearn.hmm", reason="hmmlearn is not installed")
    letters, model = english
    other = hmm.CategoricalHMM(n_components=2, init_params="", params="")
    other.n_features = 27
    other.startprob_ = np.full(2, 0.5) @ model.transition
    other.transmat_ = model.transition
    other.emissionprob_ = model.emission
    chain, parts = island.Chain(model), island.cut(letters, block)
    found, stats = within(chain.nbytes(int(log2(len(parts))) * block), chain, parts)
    assert stats.rematerializations > 0
    np.testing.assert_allclose(found, other.predict_proba(letters[:, None]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_changes_no_bit(english: Any, policy: str) -> None:
    """The posteriors within eight messages are those without a budget, to the last bit, under each policy."""
    letters, model = english
    parts = island.cut(letters[:256], 1)
    free, _ = within(None, island.Chain(model), parts)
    found, stats = within(island.Chain(model).nbytes(8), island.Chain(model), parts, policy)
    assert stats.peak == island.Chain(model).nbytes(8)
    assert found.tobytes() == free.tobytes()


def test_the_letters_read_are_the_operations_run(english: Any) -> None:
    """The count of the chain is that of the cache: first runs and repetitions."""
    letters, model = english
    chain = island.Chain(model)
    _, stats = within(chain.nbytes(10), chain, island.cut(letters, 1))
    assert chain.read == stats.operations + stats.rematerializations
    assert stats.operations == len(letters)


@pytest.mark.parametrize("k", [8, 10])
def test_steps_stay_below_n_log_n(english: Any, k: int) -> None:
    """Within log2 n messages the default needs fewer steps than the algorithm by hand, and no fewer than can be."""
    letters, model = english
    n = 2**k
    row = island.count_steps(model, letters[:n], [1, 2], ["needed", "dtr-eq"], lambda letters: None)
    assert row["equal"]
    assert row["island"]["steps"] == n * k // 2 + 1
    assert row["island"]["held"] == k + 1
    for factor, budget in zip([1, 2], row["budgets"], strict=True):
        assert budget["slots"] == factor * k
        steps = {policy: run["steps"] for policy, run in budget["policies"].items()}
        assert budget["least"] <= steps["needed"] < row["island"]["steps"]
        assert budget["least"] <= steps["dtr-eq"] < n * k
        assert {run["peak"] for run in budget["policies"].values()} == {factor * k}


@given(st.integers(1, 200))
def test_by_hand_any_length_takes_logarithmic_memory(n: int) -> None:
    """The island algorithm holds at most ceil(log2 n) + 1 messages, and reads at most n/2 log2 n + n letters."""
    chain, held = island.Chain(random_model()), [1]
    found = [*island.island(chain, island.cut(np.zeros(n, np.uint8), 1), held)]
    assert len(found) == n
    assert held[0] <= (n - 1).bit_length() + 1
    assert chain.read <= n * log2(n) / 2 + n


@pytest.mark.parametrize("n", range(2, 8))
def test_nothing_needs_fewer_steps_than_the_least(n: int) -> None:
    """Exhaustive search finds nothing below it, and reaches the number for one slot less."""
    for slots in range(2, n + 1):
        assert island.least(n, slots) == forward_runs(n + 1, slots)
        assert island.least(n, slots) <= fewest_steps(n, slots) <= island.least(n, slots - 1)


@pytest.mark.slow
def test_blocks_save_memory_that_the_system_sees(english: Any) -> None:
    """Within log2 of the blocks fewer bytes are allocated, in the books and by tracemalloc; the answers are equal."""
    letters, model = english
    found = island.measure_memory(model, np.tile(letters, 32), 512, 1, lambda letters: None)
    assert found["equal"]
    assert (found["blocks"], found["slots"]) == (64, 6)
    assert found["budget"]["peak"] == 6 * 512 * 16
    assert found["no budget"]["peak"] == len(letters) * 32 * 16
    assert found["budget"]["traced"] < found["no budget"]["traced"] / 2
    assert found["by hand"]["traced"] < found["no budget"]["traced"] / 2


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script reads some eight thousand letters."""
    text = read()[: 2**13]
    monkeypatch.setattr(island, "read", lambda: text)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("rich", [True, False])
def test_the_script_reports_what_it_found(
    rich: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, figures as JSON and a picture, with rich and without."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    if not rich:
        for module in ("rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, module, None)
    picture, figures = tmp_path / "island.png", tmp_path / "island.json"
    options = ["--smallest", "5", "--largest", "6", "--factors", "1", "--no-text"]
    assert island.main([*options, "--picture", str(picture), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("a state writes") == 2
    assert "equal to the last bit" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(figures.read_text())["steps"]
    assert [row["n"] for row in rows] == [32, 64]
    for row in rows:
        steps = row["budgets"][0]["policies"]["needed"]["steps"]
        assert f"{steps / row['n']:.2f}" in printed


@pytest.mark.usefixtures("_short")
def test_the_script_does_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are printed all the same, and what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert island.main(["--smallest", "4", "--largest", "4", "--no-text", "--picture", "none.png"]) == 0
    printed = capsys.readouterr()
    assert "needed" in printed.out
    assert "pip install '.[plot]' in a checkout" in printed.err


@pytest.mark.parametrize(
    "options",
    [["--largest", "30"], ["--smallest", "9", "--largest", "8"], ["--block", "0"], ["--json", "nowhere/figures.json"]],
)
def test_options_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2, before any work."""
    assert_refused(island, options, capsys)
