"""The inference example: what its network computes, that budgets and orders change no bit, and what memory it takes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from example_scripts import assert_refused, example
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

inference = example("inference")

RECIPES = 4_000_000  # bytes: recipes, books, and what Python and NumPy allocate besides arrays


@pytest.fixture(scope="module")
def small() -> Any:
    """Weights, and two pictures of 48 by 48 pixels."""
    pictures = inference.spoil(inference.load(48))
    return inference.learn(pictures), pictures


@pytest.fixture(scope="module")
def expected(small: Any) -> dict[str, str]:
    """The digests of plain NumPy, without the library."""
    return inference.ask(inference.make(*small))  # type: ignore[no-any-return]  # a script is Any


@pytest.fixture(scope="module")
def peak(small: Any) -> int:
    """Bytes counted without a budget."""
    with rc.Cache() as cache:
        inference.make(*rc.array(small))
        return cache.stats().peak


@pytest.fixture(scope="module")
def made(small: Any, peak: int) -> tuple[rc.Cache, dict[str, Any]]:
    """A cache, and in it all outputs, most of them evicted."""
    with rc.Cache(peak // 4) as cache:
        return cache, inference.make(*rc.array(small))


def largest(outputs: dict[str, Any]) -> int:
    """Bytes of one set of feature maps."""
    return max(value.nbytes for value in outputs.values())


@given(st.integers(5, 12), st.integers(5, 12), st.integers(0, 2**32 - 1))
def test_the_decoder_undoes_the_encoder(height: int, width: int, seed: int) -> None:
    """For planes of any size the transposed convolution gives back what went into the convolution."""
    plane = np.random.default_rng(seed).normal(size=(height, width))
    filters = np.einsum("ai,bj->ijab", *[inference.cosines(inference.SIZE)] * 2).reshape(5, 5, 25)
    responses = inference.convolve(plane, filters)
    assert responses.shape == (height + 4, width + 4, 25)
    np.testing.assert_allclose(inference.transposed_convolve(responses, filters), plane, rtol=0, atol=1e-12)


def test_convolutions_are_those_of_scipy(small: Any) -> None:
    """An independent implementation gives the same responses."""
    signal = pytest.importorskip("scipy.signal", reason="the extra 'plan' is not installed")
    weights, pictures = small
    plane = pictures[0][:, :, 0]
    responses = inference.convolve(plane, weights.filters)
    for number in range(inference.SIZE**2):
        other = signal.correlate2d(plane, weights.filters[:, :, number], mode="full", boundary="symm")
        np.testing.assert_allclose(responses[:, :, number], other, rtol=0, atol=1e-5)


def test_without_thresholds_the_picture_comes_back(small: Any) -> None:
    """Through three levels and their skip connections nothing is lost but roundings."""
    weights, pictures = small
    weights = weights._replace(thresholds=tuple(0 * threshold for threshold in weights.thresholds))
    for picture in pictures:
        np.testing.assert_allclose(inference.forward(weights, picture)["denoised 0"], picture, rtol=0, atol=1e-5)


def test_it_denoises() -> None:
    """Four decibels at least, at the finest level, in the middle of both photographs."""
    truth = inference.load(160)
    pictures = inference.spoil(truth)
    weights = inference.learn(pictures)
    for picture, true in zip(pictures, truth, strict=True):
        found = inference.forward(weights, picture)["denoised 0"]
        assert inference.decibels(found, true) > inference.decibels(picture, true) + 4


@pytest.mark.parametrize("policy", ["needed", "dtr-eq", "lru"])
@pytest.mark.parametrize("share", [None, 0.6, 0.2])
def test_a_budget_changes_no_bit(
    small: Any, expected: dict[str, str], peak: int, share: float | None, policy: str
) -> None:
    """All outputs are those of plain NumPy, and only a first output of unknown size exceeds the budget."""
    budget = None if share is None else int(share * peak)
    with rc.Cache(budget, policy=policy) as cache:
        outputs = inference.make(*rc.array(small))
        assert inference.ask(outputs) == expected
        stats = cache.stats()
    assert stats.peak <= (peak if budget is None else budget + stats.overshoot)
    assert stats.overshoot <= largest(outputs)
    assert (stats.rematerializations > 0) is (budget is not None)
    assert stats.coercions == len(expected)  # nothing left the cache but what was asked for


@given(st.data())
def test_any_order_gives_the_same_bits(made: Any, expected: dict[str, str], peak: int, data: st.DataObject) -> None:
    """Outputs asked for again and again, in any order, while the budget changes, are those of plain NumPy."""
    cache, outputs = made
    names = data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, max_size=8))
    cache.budget = int(data.draw(st.sampled_from([0.2, 0.25, 0.4, 0.7])) * peak)
    before = cache.stats().overshoot
    assert inference.ask(outputs, names) == {name: expected[name] for name in names}
    assert cache.stats().overshoot == before  # all sizes are known by now
    assert cache.stats().used <= cache.budget


@pytest.mark.slow
def test_less_memory_is_allocated() -> None:
    """The system sees the budget kept, but for the windows that one convolution copies, and the recipes."""
    pictures = inference.spoil(inference.load(96))
    weights = inference.learn(pictures)
    plain, free = inference.run_plain(weights, pictures), inference.run(weights, pictures)
    within = inference.run(weights, pictures, free.peak // 4)
    windows = 100 * 100 * inference.SIZE**2 * 4
    assert plain.digests == free.digests == within.digests
    assert within.peak <= within.budget + within.overshoot
    assert within.traced <= within.budget + within.overshoot + windows + RECIPES
    assert within.traced < plain.traced / 1.8


@pytest.mark.slow
def test_the_script_does_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are printed all the same, and what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert inference.main(["--crop", "32", "--budget", "0.5", "--repeats", "1", "--picture", "none.png"]) == 0
    printed = capsys.readouterr()
    assert "needed" in printed.out
    assert "pip install '.[plot]' in a checkout" in printed.err


@pytest.mark.parametrize("options", [["--budget", "0"], ["--budget", "1.5"], ["--crop", "8"], ["--repeats", "0"]])
def test_options_that_make_no_sense_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2, before any work."""
    assert_refused(inference, options, capsys)
