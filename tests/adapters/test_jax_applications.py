"""The JAX examples in small sizes: a language model, a long scan, an ensemble; answers, memory, and what they print."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute.events import Event, Performed

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
eqx = pytest.importorskip("equinox", reason="equinox is not installed")
for package in ("optax", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from example_scripts import example  # noqa: E402  # it lies beside other tests

import recompute_jax  # noqa: E402  # after importorskip

language_network, language_model = example("_language_network"), example("language_model")
neural_ode, long_scan = example("_neural_ode"), example("long_scan")
outputs_of, network, ensemble = example("_ensemble_outputs"), example("_ensemble_network"), example("ensemble")
digits_of = example("_digits")

jnp = jax.numpy


pytestmark = pytest.mark.usefixtures("registered_jax")


def largest_difference(one: Any, other: Any) -> float:
    """Relative to the largest element of each array."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(a).max(), 1e-30)) for a, b in pairs)


# --- The language model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    """One block, 16 wide, that reads 32 letters."""
    return language_network.Transformer(1, 16, 2, 32, jax.random.key(0))


def test_a_place_sees_nothing_of_what_comes_later(model: Any) -> None:
    """Other letters from some place on leave the scores before it as they are, and change those after it."""
    letters = next(language_network.windows(1, 1, 32))[0, :-1]
    changed = np.where(np.arange(32) < 20, letters, 3)
    score = eqx.filter_jit(model)
    found, other = np.asarray(score(letters)), np.asarray(score(changed))
    assert (found[:20] == other[:20]).all()
    assert (found[20:] != other[20:]).any()


def test_checkpoints_change_no_gradient(model: Any) -> None:
    """What budgets are compared with is the same function."""
    training = language_network.Training(model, 1, 1e-2)
    read = next(language_network.windows(1, 4, 32))
    expected = jax.jit(jax.grad(training.loss))(training.weights, read)
    found = jax.jit(jax.grad(partial(training.loss, wrap=eqx.filter_checkpoint)))(training.weights, read)
    assert largest_difference(expected, found) < 1e-5


def test_the_language_model_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within a budget it is the same training; printed, written and drawn."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture, figures = tmp_path / "model.png", tmp_path / "model.json"
    sizes = "--depth 1 --width 16 --heads 2 --window 32 --batch 4 --steps 30 --rate 1e-2 --repeats 2 --letters 20"
    options = ["--budget", "0.7", "--effort", "0.05", "--picture", str(picture), "--json", str(figures)]
    assert language_model.main([*sizes.split(), *options]) == 0
    assert "budget 70%" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    plain, within = found["ways"]
    assert within["temporaries"] <= within["budget"] <= 0.7 * plain["temporaries"]
    assert len(within["losses"]) == len(plain["losses"]) == 30
    assert within["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert within["losses"][-1] < within["losses"][0] - 0.3
    assert len(found["said"]) == len("the ") + 20


# --- The long scan ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given_digits() -> Any:
    images, digits = digits_of.load()
    return neural_ode.initial(), images[: neural_ode.BATCH], digits[: neural_ode.BATCH]


@pytest.mark.parametrize("block", [1, 4])
def test_the_scan_is_a_loop(given_digits: Any, block: int) -> None:
    """The scores are those of NumPy, step by step, whatever the blocks."""
    weights, images, _ = given_digits
    own = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    x = images @ own["first"]
    for _ in range(16):
        x = x + np.tanh(x @ own["change"] + own["offset"]) / 16
    np.testing.assert_allclose(neural_ode.scores(weights, images, 16, block), x @ own["last"], atol=1e-5)


@pytest.mark.parametrize("k", [6, 12])
def test_memory_grows_with_the_logarithm(given_digits: Any, k: int) -> None:
    """Under jit a budget of a few log2(n) states is kept, and the gradient is that of plain jit."""
    n = 2**k
    budget = long_scan.budget_for(n, 4)
    plain = jax.jit(neural_ode.gradient(n)).lower(*given_digits).compile()
    within = recompute_jax.remat(neural_ode.gradient(n), budget).lower(*given_digits).compile()
    assert within.memory_analysis().temp_size_in_bytes <= budget == 4 * k * neural_ode.STATE
    assert plain.memory_analysis().temp_size_in_bytes > 2 * n * neural_ode.STATE
    assert largest_difference(plain(*given_digits), within(*given_digits)) < 2e-6


def test_the_long_scan_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains within the budget, keeps to it under jit and op by op; printed, written and drawn."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture, figures = tmp_path / "scan.png", tmp_path / "scan.json"
    sizes = "--smallest 6 --largest 6 --op-by-op 6 --train 60 --repeats 1 --effort 0.1".split()
    assert long_scan.main([*sizes, "--picture", str(picture), "--json", str(figures)]) == 0
    assert "op by op" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    assert found["before"] < 0.3 < 0.7 < found["after"]
    plain, blocks, *within = found["runs"]
    assert [run["way"] for run in within] == ["budget", "op by op"]
    for run in within:
        assert run["memory"] <= run["budget"] == long_scan.budget_for(64, 4) < blocks["memory"] < plain["memory"]
        assert run["compute"] > 1
        assert run["apart"] < 2e-6


# --- The ensemble -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def members() -> Any:
    """Three members of four channels, and 256 images."""
    return network.initial(3, 4), jnp.asarray(digits_of.load()[0][: 2 * outputs_of.CHUNK])


@pytest.fixture(scope="module")
def answers(members: Any) -> tuple[dict[str, Any], int]:
    """All outputs, and what the cache counts for them."""
    with rc.Cache() as cache:
        outputs = outputs_of.make(*rc.array(members), outputs_of.CACHED)
        return {name: np.asarray(output.get()) for name, output in outputs.items()}, cache.stats().peak


def test_answers_are_those_of_jit(members: Any, answers: Any) -> None:
    """But for the last digits; and what the members think together is the mean of what each does."""
    plain = outputs_of.make(*members, outputs_of.PLAIN)
    assert plain.keys() == answers[0].keys()
    for name, array in plain.items():
        np.testing.assert_allclose(answers[0][name], array, rtol=1e-4, atol=1e-6)
    thoughts = [answers[0][f"0: member {number} thinks"] for number in range(3)]
    np.testing.assert_allclose(answers[0]["0: together"], np.mean(thoughts, 0), rtol=1e-6)
    np.testing.assert_allclose(answers[0]["0: disagreement"], np.var(thoughts, 0).sum(1), rtol=1e-4, atol=1e-7)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_answer_in_any_order(members: Any, answers: Any, data: st.DataObject) -> None:
    """Each as often as you like, within any budget: the bits of the run without one, and the budget is kept."""
    expected, peak = answers
    names = data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, max_size=12))
    budget = int(data.draw(st.floats(0.3, 1)) * peak)
    with rc.Cache(budget) as cache:
        outputs = outputs_of.make(*rc.array(members), outputs_of.CACHED)
        for name in names:
            assert np.asarray(outputs[name].get()).tobytes() == expected[name].tobytes()
        stats = cache.stats()
    assert stats.peak <= budget + stats.overshoot


def test_members_share_the_trunk(members: Any) -> None:
    """Without a budget each layer of the trunk runs once for each part of the images, each member's layer once."""
    events: list[Event] = []
    with rc.Cache() as cache:
        cache.subscribe(events.append)
        outputs_of.ask(outputs_of.make(*rc.array(members), outputs_of.CACHED))
    names = [event.function for event in events if isinstance(event, Performed)]
    assert sum("conv" in name for name in names) == 2 * (network.TRUNK + 3), names


def test_the_ensemble_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Learns, prints a table whose bits are the same, writes the figures, draws a picture."""
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    picture, figures = tmp_path / "ensemble.png", tmp_path / "ensemble.json"
    sizes = "--members 2 --channels 4 --images 400 --steps 30 --repeats 1 --budget 0.4".split()
    assert ensemble.main([*sizes, "--picture", str(picture), "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    plain, free, within = json.loads(figures.read_text())["runs"]
    assert within["peak"] <= within["budget"] + within["overshoot"]
    assert within["live"] < 0.7 * free["live"] <= plain["live"]
    assert within["recomputed"] > free["recomputed"] == 0


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (language_model, ["--budget", "0"]),
        (language_model, ["--width", "10"]),
        (long_scan, ["--smallest", "9", "--largest", "8"]),
        (ensemble, ["--images", "10"]),
    ],
)
def test_options_that_make_no_sense_are_refused(
    script: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2, before any work."""
    with pytest.raises(SystemExit) as left:
        script.main(options)
    assert left.value.code == 2
    assert "error" in capsys.readouterr().err
