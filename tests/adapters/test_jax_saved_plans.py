"""Plans of `recompute_jax.remat` are the same everywhere, and can be kept in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import recompute as rc
from recompute.planners import PlanError

jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")

import jax.numpy as jnp  # noqa: E402  # after importorskip
from jax import lax  # noqa: E402  # after importorskip
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402  # after importorskip

from recompute_jax import remat  # noqa: E402  # after importorskip
from recompute_jax._remat.report import SavedPlan  # noqa: E402  # after importorskip


def layers(w: Any, x: Any) -> Any:
    """Layers one after the other."""
    for _ in range(4):
        x = jnp.tanh(x @ w) + 0.1 * x
    return (x**2).mean()


def rolled(w: Any, x: Any) -> Any:
    """A scan, whose gradient has two that share stacks."""
    last, _ = lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=20)
    return (last**2).mean()


def branched(w: Any, x: Any) -> Any:
    """A conditional, whose gradient has two that share values."""
    return (lax.cond(w[0, 0] > 0, layers, lambda w, x: jnp.sin(x @ w).sum(), w, x) ** 2).sum()


def trained(w: Any, x: Any) -> Any:
    """A loop of training steps, whose body is planned."""
    return lax.fori_loop(0, 2, lambda _, w: w - 0.1 * jax.grad(layers)(w, x), w)


FUNCTIONS: Any = {
    "layers": (jax.grad(layers), 0.7),
    "scan": (jax.grad(rolled), 0.5),
    "body": (trained, 0.8),
    "branches": (jax.grad(branched), 0.4),
    "plain": (jax.grad(layers), 1.0),
}


def arrays() -> tuple[Any, Any]:
    one, two = jax.random.split(jax.random.key(1))
    return jax.random.normal(one, (32, 32)) / 6, jax.random.normal(two, (256, 32))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_saved_plan_is_the_same_program(name: str, tmp_path: Path) -> None:
    """What a file says is followed without a compilation, and lowers to the same text."""
    function, share = FUNCTIONS[name]
    planned = remat(function, of_peak=share, compilations=1)
    plan = planned.plan(*arrays())
    plan.save(tmp_path / "plan.json")
    for source in (plan, planned.plan, tmp_path / "plan.json"):
        again = remat(function, plan=source)
        found = again.plan(*arrays())
        assert found.trials == ()
        assert (found.compiled, found.overhead, found.regions) == (plan.compiled, plan.overhead, plan.regions)
        assert (found.kept, found.recomputed) == (plan.kept, plan.recomputed)
        assert again.lower(*arrays()).as_text() == planned.lower(*arrays()).as_text()


def test_a_plan_of_another_program_is_refused(tmp_path: Path) -> None:
    """Other shapes, and another function, are seen; so is a file that is no plan."""
    function, share = FUNCTIONS["layers"]
    plan = remat(function, of_peak=share, compilations=1).plan(*arrays())
    w, x = arrays()
    with pytest.raises(PlanError, match="another program"):
        remat(function, plan=plan)(w, x[:100])
    with pytest.raises(PlanError, match="another program"):
        remat(lambda w, x: function(w, jnp.sin(x)), plan=plan)(w, x)
    path = tmp_path / "other.json"
    for text in ("no plan", "{}", "[]", '{"recompute remat plan": 1}', '{"recompute remat plan": 3, "recipe": 3}'):
        path.write_text(text)
        with pytest.raises(PlanError, match=r"other\.json is not a file"):
            remat(function, plan=path)
    plan.save(path)
    content = json.loads(path.read_text())
    assert SavedPlan.load(path) == plan.saved
    order = content["recipe"]["order"]
    for damage in ({"of_peak": "x"}, {"recipe": {}}, {"recipe": {**content["recipe"], "order": order[1:]}}):
        path.write_text(json.dumps(content | damage))
        with pytest.raises(PlanError, match="or was changed since: make and save the plan again"):
            remat(function, plan=path)


def test_a_plan_made_elsewhere_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """If versions differ, the plan is compiled once to see that it is still within its budget."""
    function, share = FUNCTIONS["layers"]
    plan = remat(function, of_peak=share, compilations=1).plan(*arrays())
    monkeypatch.setattr("recompute_jax._remat.traced.made_with", lambda *_: "jax 99")
    assert len(remat(function, plan=plan).plan(*arrays()).trials) == 1
    object.__setattr__(plan.saved, "budget", plan.compiled - 1)
    with pytest.raises(rc.BudgetError, match=r"made with .*; with jax 99 it needs"):
        remat(function, plan=plan)(*arrays())


def test_a_budget_or_a_plan() -> None:
    """One of both is wanted."""
    with pytest.raises(TypeError, match=r"or a plan=$"):
        remat(layers)
    with pytest.raises(TypeError, match="not both"):
        remat(layers, of_peak=0.5, plan="plan.json")


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_jax_saved_plans import FUNCTIONS, arrays, remat
for name in ("layers", "scan"):
    function, share = FUNCTIONS[name]
    remat(function, of_peak=share, compilations=1).plan(*arrays()).save(f"{sys.argv[2]}-{name}.json")
"""


def test_every_process_makes_the_same_plan(tmp_path: Path) -> None:
    """Whatever order sets have, and however busy the machine is."""
    for seed in "12":
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path / seed)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    for name in ("layers", "scan"):
        assert (tmp_path / f"1-{name}.json").read_text() == (tmp_path / f"2-{name}.json").read_text()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """JAX's persistent cache, in an empty folder."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_plans_are_kept_where_jax_keeps_programs(kept: Path) -> None:
    """The same function, options and arguments find the plan of another process; others do not."""
    args = arrays()
    gradient = jax.grad(layers)
    first = remat(gradient, of_peak=0.7, compilations=3).plan(*args)
    (path,) = kept.glob("recompute-plan-*.json")
    again = remat(gradient, of_peak=0.7, compilations=3)
    plan = again.plan(*args)
    assert first.trials
    assert not plan.trials
    assert plan.saved == first.saved
    assert again.lower(*args).compile().memory_analysis().temp_size_in_bytes == first.compiled
    for other in (
        remat(gradient, of_peak=0.75, compilations=3),
        remat(gradient, of_peak=0.7, compilations=2),
        remat(gradient, of_peak=0.7, compilations=3, donate_argnums=0),
    ):
        assert other.plan(*args).trials
    assert len(list(kept.glob("recompute-plan-*.json"))) == 4
    path.write_text("no plan")
    assert remat(gradient, of_peak=0.7, compilations=3).plan(*args).saved == first.saved
    assert SavedPlan.load(path) == first.saved


@pytest.mark.filterwarnings("ignore:Error .* persistent compilation cache:UserWarning")  # JAX's, of what it compiles
def test_a_folder_that_cannot_be_written_is_said(kept: Path) -> None:
    """A plan that cannot be kept is used, with a warning."""
    file = kept / "file"
    file.write_text("no folder")
    jax.config.update("jax_compilation_cache_dir", str(file))
    with pytest.warns(UserWarning, match="could not be kept"):
        assert remat(jax.grad(layers), of_peak=0.7, compilations=2).plan(*arrays()).trials
