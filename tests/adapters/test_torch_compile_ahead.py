"""Compiled steps planned without running: the largest batch, the command, and the plan in torch's own partitioner."""

from __future__ import annotations

import copy
import pickle
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_compiled import compiled, image, left, network, same  # noqa: E402  # after importorskip
from torch import Tensor, nn  # noqa: E402  # after importorskip
from torch._functorch import config  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # after importorskip
from recompute_torch.__main__ import main  # noqa: E402  # after importorskip
from recompute_torch._compile.partition import KnownPlan, best  # noqa: E402  # after importorskip

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = ["conv", "norm", "dropout", "gelu"] * 2
BUDGET = 100_000


def images(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 2, 12, 12),)


def fits(batch: int) -> bool:
    """Whether a real step with such a batch is planned, and keeps to the budget."""
    step = compiled(network(DEEP), BUDGET)
    try:
        step(*images(batch)).backward()
    except rc.BudgetError:
        return False
    (plan,) = step.plan
    assert plan.peak is not None
    assert plan.peak <= BUDGET + 4  # bytes of the gradient of the loss, which the caller holds
    return True


def test_the_largest_batch_is_the_largest_that_runs() -> None:
    """A real step with it keeps to the budget, and with one sample more it is refused."""
    module = network(DEEP)
    step = compiled(module, BUDGET)
    before = torch.get_rng_state()
    batch = step.plan.largest_batch(images)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not len(step.plan)
    assert (fits(batch), fits(batch + 1)) == (True, False)
    assert rt.plans(step).largest_batch(images, 1, batch - 1) == batch - 1
    assert rt.plans(step).largest_batch(images, 1, batch + 2) == batch


def test_a_step_stays_compiled_while_batches_are_tried() -> None:
    """What dynamo knows of its shapes is as before: the next batch of another size is what it would have been."""
    module = network(["conv", "gelu"])
    step = compiled(module, "1MB")
    step(*images(2)).backward()
    step.plan.largest_batch(lambda batch: {"x": images(batch)[0]}, 1, 3)
    step(*images(2)).backward()
    assert len(step.plan) == 1


class Trainer:
    """Whose step is compiled with the class."""

    def __init__(self) -> None:
        self.module = network(["conv", "gelu"])

    def plain(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found

    step = rt.compile(plain, "90KB", costs="estimated")


def test_the_largest_batch_of_a_method_is_that_of_a_function() -> None:
    """Batches are tried with the object that the method belongs to."""
    trainer = Trainer()
    function = rt.compile(trainer.plain, "90KB", costs="estimated")
    assert rt.plans(trainer.step).largest_batch(images) == rt.plans(function).largest_batch(images) > 1


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        torch._dynamo.graph_break()
        return x.sum()


@pytest.mark.parametrize(
    ("budget", "make", "low", "high", "error", "words"),
    [
        (0.5, images, 1, None, ValueError, "in bytes"),
        (BUDGET, images, 0, None, ValueError, "from 1 or more"),
        (BUDGET, images, 3, 2, ValueError, "from 1 or more"),
        (BUDGET, images, 1.0, None, TypeError, "whole numbers, not 1.0 and None"),
        (BUDGET, images, 1, "8", TypeError, "whole numbers, not 1 and '8'"),
        (BUDGET, images, 1000, None, rc.BudgetError, "a batch of 1000 does not fit: .* is too small"),
        ("1MB", lambda batch: images(2), 1, None, ValueError, "does not grow"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    budget: Any, make: Any, low: Any, high: Any, error: type[Exception], words: str
) -> None:
    """With the cure."""
    with pytest.raises(error, match=words):
        compiled(network(DEEP), budget).plan.largest_batch(make, low, high)


def test_steps_without_one_graph_are_refused() -> None:
    """One that breaks, and one without gradients."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"fullgraph=True\) shows where"):
        compiled(Broken(), BUDGET).plan.largest_batch(lambda _: x)
    with pytest.raises(ValueError, match="no gradients"):
        compiled(lambda x: x.sum(), BUDGET).plan.largest_batch(lambda _: torch.ones(2))


MAKE = """
import torch
from torch import nn

def make_step():
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)])
    return lambda x: module(x).square().mean(), torch.randn(512, 32)

def forgets():
    return 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a name that no other test imports."""
    monkeypatch.setattr("sys.path", [*sys.path])
    path = tmp_path / f"making_{tmp_path.name}.py".replace("-", "_")
    path.write_text(MAKE)
    return path


def test_the_command_tells_budgets_and_the_line_to_paste(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line compiles the step with the overhead and the peak that it said; more memory is never dearer."""
    options = ["--costs", "estimated", "--effort", "0.03", "--slower", "1.5", "--budgets", "100%,30%,70%,1%,800kB"]
    assert main(["budget", f"{file}:make_step", *options]) == 0
    told = capsys.readouterr().out
    rows = [line.split() for line in told.splitlines() if line.endswith(tuple("0123456789")) and " ms " in line]
    overheads = [float(row[5]) for row in rows]
    assert len(rows) == 4
    assert overheads == sorted(overheads)
    assert "the least that a plan was found for is" in told
    line = told.splitlines()[-1]
    assert line.startswith('step = rt.compile(step, "')
    step, x = import_module(file.stem).make_step()
    torch.compiler.reset()
    scope: dict[str, Any] = {"rt": rt, "step": step}
    exec(line.replace('")', '", costs="estimated", effort=0.03)'), scope)
    scope["step"](x).backward()
    (plan,) = scope["step"].plan
    assert f"# {plan.overhead:.2f} times" in line
    assert plan.peak is not None
    assert plan.peak <= plan.budget + 4


@pytest.mark.parametrize(
    ("budgets", "words"), [("0", "at least one byte, not '0'"), ("70%,lots", "'lots' is not a size"), ("9%,", "''")]
)
def test_the_command_says_which_budget_is_wrong(
    file: Path, budgets: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, not a traceback of dynamo's."""
    assert main(["budget", f"{file}:make_step", "--budgets", budgets]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_step", "is 'package.module:function'"),
        ("nowhere.py:make_step", "there is no file"),
        ("recompute_nowhere:make_step", "run it where"),
        ("{}:unknown", "has no attribute 'unknown'"),
        ("{}:forgets", "is to return the step and its inputs"),
    ],
)
def test_the_command_says_what_is_wrong(file: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, and with status 2."""
    assert main(["budget", name.format(file)]) == 2
    assert words in capsys.readouterr().err


@given(
    asked=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)))),
        min_size=1,
    )
)
def test_what_is_chosen_from_small_to_large_is_never_dearer(
    asked: list[tuple[int, list[tuple[int, int, int]]]],
) -> None:
    """Neither in time nor in operations, whatever the searches find: (budget, plans found for it)."""
    known: list[KnownPlan] = []
    for budget, plans in sorted(asked):
        new = [KnownPlan((), min(peak, budget), cost, flops) for peak, cost, flops in plans]
        if not new and not known:
            continue
        chosen = best(known, new)
        assert chosen.peak <= budget
        assert all(chosen.cost <= plan.cost and chosen.flops <= plan.flops for plan in known)
        assert chosen in [*known, *new]
        known.append(chosen)


class Recording(rt.KnapsackSolver):
    """Knows how much it saved."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options, effort=0.03)
        self.saved: list[tuple[float, float, set[str]]] = []

    def __call__(self, memory: Any, joint_graph: Any, max_memory: float, node_info: Any, nodes: Any) -> Any:
        saved, again = super().__call__(memory, joint_graph, max_memory, node_info, nodes)
        assert sorted([*saved, *again]) == list(range(len(nodes)))
        self.saved.append((sum(memory[number] for number in saved), max_memory, {nodes[n].name for n in saved}))
        return saved, again


def by_torch(names: list[str], ratio: float, solver: Any) -> list[Tensor]:
    """What is left of steps that torch splits as the solver says."""
    torch.compiler.reset()
    module = network(names)
    with config.patch(
        activation_memory_budget=ratio, activation_memory_budget_solver=solver, enable_autograd_cache=False
    ):
        return left(module, torch.compile(module, backend="aot_eager"), image())


LIGHT = ["conv", "gelu"] * 4


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.1])
def test_the_solver_keeps_to_the_limit_of_torch(ratio: float) -> None:
    """What it saves is no more, in the measure of torch; gradients are those of eager mode."""
    module, solver = network(LIGHT), Recording()
    assert same(left(module, module, image()), by_torch(LIGHT, ratio, solver))
    saved, most, _ = solver.saved[-1]
    assert saved <= most


def test_a_solver_with_more_bytes_saves_more() -> None:
    """And one with a share of the peak as many as with these bytes."""
    saved = []
    for solver in (Recording(of_peak=1), Recording(of_peak=0.5), Recording(1)):
        by_torch(LIGHT, 0.01, solver)
        saved.append(solver.saved[-1][0])
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[2]


def test_solvers_are_told_apart_in_the_cache() -> None:
    """By what they were made with; equal ones are equal."""
    solvers = [rt.KnapsackSolver(), rt.KnapsackSolver(), rt.KnapsackSolver("1GB"), rt.KnapsackSolver(effort=0.2)]
    names = [solver.uuid() for solver in solvers]
    assert names[0] == names[1]
    assert len(set(map(repr, names))) == 3
    with pytest.raises(ValueError, match="much"):
        rt.KnapsackSolver("much")
    with pytest.raises(ValueError, match=r"of_peak=0\.5"):
        rt.KnapsackSolver(0.5)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="costs is one of measured, estimated"):
        rt.KnapsackSolver("1GB", costs="model")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="effort"):
        rt.KnapsackSolver("1GB", effort=-1)


def test_what_was_planned_is_pickled() -> None:
    """Alone, or with a compiled module, which is pickled as `torch.compile` lets it; with the measured peak."""
    step = rt.planned(nn.Linear(8, 8), "1MB", costs="estimated")
    step(torch.ones(4, 8)).sum().backward()
    plan = rt.plans(step)
    again: Any = pickle.loads(pickle.dumps(step))
    for other in (rt.plans(again), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert other.to_json() == plan.to_json()
        assert other.peak == plan.peak
    assert plan.peak is not None
    assert torch.equal(again(torch.ones(4, 8)), step(torch.ones(4, 8)))


def test_what_is_for_other_backends_is_refused() -> None:
    """When the step is made, not when it is compiled."""
    for name in ("backend", "mode", "options"):
        with pytest.raises(TypeError, match=f"takes no {name}"):
            rt.planned(torch.sin, "1GB", **{name: None})  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="a function or a module first"):
        rt.planned("1GB", "1GB")  # type: ignore[type-var]  # on purpose
