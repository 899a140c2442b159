"""The training example: its derivatives, that budgets change no bit of the parameters, and the memory it takes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_scripts import assert_refused, example, run
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
pytest.importorskip("autograd", reason="the extra 'autograd' is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

training = example("training")
network, steps, memory = (example(f"_training_{part}") for part in ("network", "steps", "memory"))

SETTINGS = steps.Settings(depth=12, batch=48, steps=4)
SHARES = [0.75, 0.5, 0.3]


@pytest.fixture(scope="module")
def digits() -> Any:
    """Digits to learn from, and digits to be examined in."""
    return network.load()


@pytest.fixture(scope="module")
def plain(digits: Any) -> Any:
    """By plain arrays and autograd alone."""
    return steps.train(digits[0], SETTINGS, derive=steps.gradients_by_autograd)


@pytest.fixture(scope="module")
def free(digits: Any) -> Any:
    """Without a budget."""
    return steps.train(digits[0], SETTINGS, rc.Cache())


def test_it_learns(digits: Any) -> None:
    """Within half of the activations a small network recognises most digits that it has never seen."""
    learn, examine = digits
    settings = steps.Settings(depth=6, batch=32, steps=90, rate=3e-3)
    budget = memory.budget_for(0.5, memory.unlimited(learn, settings))
    run = steps.train(learn, settings, rc.Cache(budget))
    assert run.stats.rematerializations > 0
    assert np.mean(run.losses[-10:]) < np.mean(run.losses[:10]) / 4
    assert steps.accuracy(run.parameters, examine) > 0.9


def test_the_digits_are_real(digits: Any) -> None:
    """All that come with scikit-learn, none to learn from and to be examined in at once."""
    learn, examine = digits
    assert (len(learn.images), len(examine.images)) == (1437, 360)
    assert learn.images.dtype == np.float32
    assert {*learn.wanted.argmax(1)} == {*range(10)}
    assert 0 == learn.images.min() < learn.images.max() == 1


def test_the_cache_without_a_budget_changes_no_bit(plain: Any, free: Any, digits: Any) -> None:
    """Plain arrays by autograd alone, by the tape that is forgotten, and recomputable arrays: the same parameters."""
    forgetful = steps.train(digits[0], SETTINGS)
    assert plain.digest == forgetful.digest == free.digest
    assert plain.losses == forgetful.losses == free.losses


@pytest.mark.parametrize("share", SHARES)
def test_a_budget_changes_no_bit(share: float, plain: Any, free: Any, digits: Any) -> None:
    """The parameters within a budget are those of plain autograd; the books stay within it, and do not grow."""
    budget = memory.budget_for(share, free)
    run = steps.train(digits[0], SETTINGS, rc.Cache(budget))
    assert run.stats.rematerializations > 0
    assert run.digest == plain.digest
    assert run.losses == plain.losses
    assert run.stats.peak <= budget + run.stats.overshoot
    assert run.stats.overshoot <= SETTINGS.result
    assert len({*run.used}) == 1
    assert run.used[0] < run.fixed


def test_autograds_own_way_back_changes_no_bit(plain: Any, free: Any, digits: Any) -> None:
    """`value_and_grad` over recomputable arrays, within half of the activations."""
    cache = rc.Cache(memory.budget_for(0.5, free))
    run = steps.train(digits[0], SETTINGS, cache, derive=steps.gradients_by_autograd)
    assert run.stats.rematerializations > 0
    assert run.digest == plain.digest


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dtr-eq", "dtr", "lru"])
def test_no_policy_changes_a_bit(policy: str, plain: Any, free: Any, digits: Any) -> None:
    """Under other policies, too."""
    cache = rc.Cache(memory.budget_for(0.6, free), policy=policy)
    run = steps.train(digits[0], SETTINGS, cache)
    assert run.stats.rematerializations > 0
    assert run.digest == plain.digest


def test_a_budget_is_kept_in_the_first_step_too(free: Any, digits: Any, plain: Any) -> None:
    """With room left for one result whose size is not known yet, the books never exceed the budget."""
    budget = memory.budget_for(0.5, free)
    run = memory.careful(digits[0], SETTINGS, budget)
    assert run.stats.peak <= budget
    assert run.digest == plain.digest


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, *SHARES])
def test_memory_is_real(share: float, free: Any, digits: Any) -> None:
    """What tracemalloc sees, Python's objects included, stays within budget, overshoot and the stated allowance."""
    cache = rc.Cache(memory.budget_for(share, free), foresight=False)  # a plan takes memory while it is made
    most = memory.traced(lambda: steps.train(digits[0], replace(SETTINGS, steps=2), cache))
    assert most <= cache.budget + cache.stats().overshoot + SETTINGS.allowance


def test_the_tape_is_forgotten(digits: Any) -> None:
    """Plain arrays go as soon as they were used: that takes less memory than autograd's own way back."""
    short = replace(SETTINGS, steps=1)
    own = memory.traced(lambda: steps.train(digits[0], short))
    theirs = memory.traced(lambda: steps.train(digits[0], short, derive=steps.gradients_by_autograd))
    assert own < theirs


def test_what_recomputes_without_end_is_given_up(free: Any, digits: Any) -> None:
    """Rather than to take all day, or because it does not fit at all."""
    budget = free.fixed + 5 * SETTINGS.result
    with pytest.raises((memory.Stalled, rc.BudgetError)):
        memory.patient(digits[0], SETTINGS, budget, free)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_convolution_is_what_it_says(images: int, before: int, after: int, seed: int) -> None:
    """Each pixel is the sum over its neighbourhood, one by one; zeros lie around the image."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(images, 4, 5, before))
    kernels = random.normal(size=(3, 3, before, after))
    expected = np.zeros((images, 4, 5, after))
    for row, column in np.ndindex(4, 5):
        for down, right in np.ndindex(3, 3):
            i, j = row + down - 1, column + right - 1
            if 0 <= i < 4 and 0 <= j < 5:
                expected[:, row, column] += x[:, i, j] @ kernels[down, right]
    np.testing.assert_allclose(network.convolve(x, kernels), expected, rtol=0, atol=1e-12)


def test_derivatives() -> None:
    """Those written by hand are those of small differences, as autograd's own checker has it."""
    from autograd.test_util import check_grads

    random = np.random.default_rng(0)
    x, kernels = random.normal(size=(18, 3, 4, 2)), random.normal(size=(3, 3, 2, 3))
    check_grads(network.convolve, modes=["rev"], order=1)(x, kernels)
    check_grads(network.rectify, modes=["rev"], order=1)(x)
    wanted = np.eye(10)[random.integers(0, 10, 5)]
    check_grads(lambda scores: network.cross_entropy(scores, wanted), modes=["rev"], order=1)(
        random.normal(size=(5, 10))
    )


def test_adam() -> None:
    """The first step goes by the rate against the sign of the gradient; the averages are those of the paper."""
    weights, gradient = np.array([1.0, 2.0, 3.0]), np.array([0.5, -4.0, 0.0])
    zeros = np.zeros(3)
    rates = (0.01 / (1 - 0.9), 1 / (1 - 0.999))
    new, mean, square = steps.adam(weights, zeros, zeros, gradient, rates)
    np.testing.assert_allclose(new, [0.99, 2.01, 3.0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(mean, 0.1 * gradient)
    np.testing.assert_allclose(square, 0.001 * gradient**2)


def test_minibatches() -> None:
    """Each pass shows every digit once, whatever the size of a batch."""
    for batch in (3, 10, 25):
        settings = replace(SETTINGS, batch=batch, steps=20)
        chosen = [*steps.minibatches(10, settings)]
        assert {len(minibatch) for minibatch in chosen} == {batch}
        seen = np.concatenate(chosen)
        for start in range(0, len(seen) - 9, 10):
            assert {*seen[start : start + 10].tolist()} == {*range(10)}


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("2kB", 2000), ("1.5MB", 1_500_000), ("1 GB", 10**9)])
def test_sizes(text: str, size: int) -> None:
    """Bytes as people write them."""
    assert training.bytes_of(text) == size


def test_shares(free: Any, digits: Any) -> None:
    """A share is one of the activations; what is no size is refused."""
    assert training.within("0.5", digits[0], SETTINGS) == memory.budget_for(0.5, free)
    assert memory.budget_for(1.0, free) == free.stats.peak
    assert memory.budget_for(0.0, free) == free.fixed
    for wrong in ("", "-1", "much", "0"):
        with pytest.raises(ValueError, match=r"not a size|at least one byte"):
            training.within(wrong, digits[0], SETTINGS)


@pytest.fixture
def few(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script see four minibatches."""
    monkeypatch.setattr(training, "load", lambda xp: [digit.take(slice(64)) for digit in digits])


SMALL = ["--depth", "8", "--batch", "16", "--epochs", "1", "--budget", "1MB"]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures as tables and as JSON, and a picture; what does not fit is said to be so."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture, figures = tmp_path / "training.png", tmp_path / "training.json"
    options = [*SMALL, "--table", "--budgets", "0.6", "0.01", "--largest", "--factors", "2", "8"]
    assert training.main([*options, "--picture", str(picture), "--json", str(figures)]) == 0
    printed = capsys.readouterr()
    assert "equal to the last bit" in printed.out
    assert "does not fit" in printed.out
    assert "step 4 of 4: loss" in printed.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    rows = found["table"]["rows"]
    assert [row["name"] for row in rows] == ["plain, autograd", "plain", "no budget", "60%", "1%"]
    assert {row["digest"] for row in rows[:4]} == {found["training"]["digest"]}
    assert "error" in rows[4]
    for enlarged in found["largest"]:
        twice, much_more = enlarged["rows"]
        assert twice["equal"]
        assert twice["peak"] <= enlarged["budget"] < twice["needs"]
        assert twice["traced"] <= enlarged["budget"] + twice["allowance"]
        assert not much_more["fits"]


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_script_does_without_extras(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without rich there are no bars, without matplotlib no picture; the figures are printed all the same."""
    for module in ("rich.console", "rich.progress", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    assert training.main([*SMALL, "--table", "--budgets", "0.6", "--picture", "none.png"]) == 0
    printed = capsys.readouterr()
    assert "equal to the last bit" in printed.out
    assert "step 4 of 4: loss" in printed.err
    assert "no picture" in printed.err


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--budget", "some"], ["--confine", "some"], ["--depth", "x"]])
def test_options_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2, before any work."""
    assert_refused(training, options, capsys)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the address space is limited on Linux alone")
def test_the_system_enforces_it() -> None:
    """With little more address space than the budget it trains; plain arrays run out of the same memory."""
    settings = replace(SETTINGS, batch=256)
    options = ["--depth", str(settings.depth), "--batch", str(settings.batch), "--epochs", "1"]
    options += ["--confine", str(10_000_000 + settings.allowance + 4_000_000)]  # what malloc cannot use
    confined = run("training", *options, "--budget", "10MB")
    assert confined.returncode == 0, confined.stderr
    assert "recognised" in confined.stdout
    burst = run("training", *options, "--plain")
    assert burst.returncode == 1
    assert "it does not fit" in burst.stderr
