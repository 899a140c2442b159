"""Steps by inductor with a budget: which split is taken, what lives inside of kernels, and the same gradients.

C++ takes seconds to compile, so most tests run the split graphs operator by operator.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute.traces import Program

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_compiled import (  # noqa: E402  # after importorskip
    LAYERS,
    compiled,
    image,
    left,
    network,
    runs,
    same,
    within,
)
from torch import Tensor, nn  # noqa: E402  # after importorskip
from torch._dynamo.backends.debugging import boxed_nop  # noqa: E402  # after importorskip
from torch._inductor import cpp_builder, virtualized  # noqa: E402  # after importorskip
from torch._inductor.choices import InductorChoices  # noqa: E402  # after importorskip
from torch.nn import functional  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # after importorskip
from recompute_torch._compile import inductor, peak  # noqa: E402  # after importorskip
from recompute_torch._compile.inductor import min_cut  # noqa: E402  # after importorskip
from recompute_torch._compile.partition import Partitioner, Scheduled  # noqa: E402  # after importorskip

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:graph 0 took"),  # operator by operator it takes more than as kernels
]

DETERMINISTIC = sorted(LAYERS.keys() - {"dropout"})  # which one must compile to draw as inductor draws
NAMES = st.lists(st.sampled_from(DETERMINISTIC), min_size=2, max_size=6).filter(runs)
DEEP = ["conv", "norm", "gelu", "conv", "norm", "gelu", "residual", "glu"]
LINEAR = ["linear", "gelu"] * 6


def by_inductor(module: Any, budget: int | float | str, **options: Any) -> Any:
    return compiled(module, budget, compiler="inductor", **options)


def near(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """Within the rounding of other kernels."""
    return len(one) == len(two) and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(one, two, strict=True)
    )


class Mean(nn.Sequential):
    """Layers, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x).square().mean()  # type: ignore[no-untyped-call]  # as it is in torch
        return found


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What inductor would compile runs operator by operator, which takes more than kernels do."""
    for module in (inductor, peak):
        monkeypatch.setattr(module, "compile_fx_inner", lambda graph, given, **_: boxed_nop(graph, given))
    monkeypatch.setattr(inductor, "scheduled", lambda *_: [])
    monkeypatch.setattr(inductor, "keep_scheduled", lambda *_: None)


@pytest.fixture
def unfused(rehearsed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, however much it takes."""
    monkeypatch.setattr(inductor.Rehearsal, "peak", lambda _: None)


@pytest.mark.usefixtures("unfused")
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES, share=st.floats(0.3, 1.0))
def test_a_budget_changes_no_result(names: list[str], share: float) -> None:
    """Losses, gradients and buffers are those of eager mode but for rounding, and the plan is within the budget."""
    found = within(names, share, compiler="inductor")
    if found is not None:
        expected, results, plan = found
        assert near(expected, results)
        assert plan.planned <= plan.budget


@pytest.mark.usefixtures("rehearsed")
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=NAMES, share=st.floats(0.3, 0.99))
def test_what_takes_too_much_is_planned_again_or_refused(names: list[str], share: float) -> None:
    """However wrong the estimate is, a step that is not refused takes no more than the budget."""
    found = within(names, share, compiler="inductor")
    if found is not None:
        expected, results, plan = found
        assert near(expected, results)
        assert plan.peak is not None
        assert plan.peak <= plan.budget


@pytest.mark.usefixtures("rehearsed")
def test_a_plan_for_less_says_so() -> None:
    """Linear layers fit with less to plan for; the report says how much of the budget that is."""
    plan = split_of(network(LINEAR), 0.8)
    assert plan.peak is not None
    assert plan.planned < plan.peak <= 1.05 * plan.budget
    assert plan.planned <= plan.share * plan.budget < plan.budget
    assert f"planned for {plan.share:.0%} of the budget" in str(plan)


@pytest.mark.usefixtures("rehearsed")
def test_a_rehearsal_takes_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows before training, and changes no parameter, no buffer and no random number."""
    peaks, results = [], []
    for rehearse in (inductor.Rehearsal.peak, lambda _: None):
        monkeypatch.setattr(inductor.Rehearsal, "peak", lambda given, way=rehearse: peaks.append(way(given)))
        module = network(["conv", "norm", "dropout", "counting"])
        step = by_inductor(module, 1.0)
        results.append(left(module, step, image()))
    real = rt.plans(step)[0].peak
    assert real is not None
    assert real - 4 == peaks[0]  # the gradient of the loss came from outside, and is not seen to go
    assert same(*results)


@pytest.mark.usefixtures("rehearsed")
def test_a_rehearsal_with_shapes_that_may_change() -> None:
    """It has the shapes that the step was compiled with."""
    module = network(LINEAR)
    step = by_inductor(module, 0.8, dynamic=True)
    left(module, step, image(), steps=1)
    (plan,) = rt.plans(step)
    assert plan.share < 1
    assert plan.peak is not None
    assert plan.peak <= plan.budget


@pytest.mark.usefixtures("rehearsed")
def test_what_does_more_than_compute_is_not_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    """An operator that prints does so once in a step; a warning says if the step takes too much."""

    @torch.library.custom_op("recompute_tests::told", mutates_args=())  # type: ignore[untyped-decorator]
    def told(x: Tensor) -> Tensor:
        print("told")
        return x.clone()

    told.register_fake(torch.empty_like)
    told.register_autograd(lambda _, gradient: gradient)
    torch.library._register_effectful_op("recompute_tests::told", torch._library.effects.EffectType.ORDERED)
    module = network(LINEAR)
    step = by_inductor(lambda x: module(told(x)), 0.8)
    step(image()).backward()
    assert capsys.readouterr().out == "told\n"
    assert rt.plans(step)[0].share == 1


@pytest.mark.usefixtures("unfused")
def test_what_torch_does_is_taken_if_it_fits() -> None:
    """With room, the split is that of the default partitioner, and the report says so."""
    module = network(DEEP)
    step = by_inductor(module, 1.0)
    left(module, step, image(), steps=1)
    (plan,) = rt.plans(step)
    assert (plan.split, plan.planned, plan.saved) == ("min-cut at 1", plan.plain, plan.saved_plain)
    assert "split by torch's own partitioner: min-cut at 1" in str(plan)


@pytest.mark.usefixtures("unfused")
def test_where_there_is_a_plan_torch_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cut at a ratio takes as long as planning does; without a plan, only ratios above the floor are worth it."""
    ratios: list[float] = []

    def counted(module: Any, results: int, ratio: float, lasting: Any) -> Any:
        ratios.append(ratio)
        return min_cut(module, results, ratio, lasting)

    monkeypatch.setattr(inductor, "min_cut", counted)
    assert split_of(network(LINEAR), 0.8).split == "planned"
    with pytest.raises(rc.BudgetError):
        split_of(network(LINEAR), 1000)
    assert ratios == [1.0, 1.0]


@pytest.mark.usefixtures("rehearsed")
def test_planning_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels take twice what they may however often they are planned, four compilations tell so."""
    compilations: list[None] = []

    def peak(_: object) -> int:
        compilations.append(None)
        return 1 << 30

    monkeypatch.setattr(inductor.Rehearsal, "peak", peak)
    with pytest.raises(rc.BudgetError, match="too small"):
        split_of(network(LINEAR), 0.8)
    assert len(compilations) <= 4


@given(
    room=st.integers(0, 10**9),
    slope=st.floats(0.25, 1.0),
    first=st.integers(10**6, 10**9),
    aim=st.integers(10**5, 10**9),
)
def test_two_plans_tell_how_the_kernels_follow_a_third(room: int, slope: float, first: int, aim: int) -> None:
    """If the peak of kernels grows linearly with that of plans, the third plan meets the aim to a thousandth."""
    pairs: list[tuple[int, int]] = []
    planned = first
    for _ in range(3):
        pairs.append((planned, int(room + slope * planned)))
        planned = inductor.corrected(aim, pairs[-1], pairs[-2] if len(pairs) > 1 else None)
    assert abs(pairs[2][1] - aim) <= 100 + 0.001 * abs(aim - pairs[0][1])


def split_of(module: nn.Module, budget: int | float | str) -> rt.GraphPlan:
    step = by_inductor(module, budget)
    left(module, step, image(), steps=1)
    return rt.plans(step)[0]


@pytest.mark.usefixtures("unfused")
def test_a_plan_costs_less_than_what_torch_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same budget, the planned split has less overhead than any that torch finds at its ratios."""
    planned = split_of(network(LINEAR), 0.8)
    monkeypatch.setattr(Partitioner, "fitted", lambda *_: None)
    theirs = split_of(network(LINEAR), planned.budget)
    assert planned.split == "planned"
    assert theirs.split.startswith("min-cut at 0.")
    assert planned.overhead < theirs.overhead


@pytest.mark.usefixtures("unfused")
def test_torch_is_not_let_draw_other_random_numbers() -> None:
    """Where its only splits that fit would draw dropout anew, they are not taken."""
    module = network(["conv", "dropout"] * 3)
    assert split_of(module, 0.8).split == "planned"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partitioner, "fitted", lambda *_: None)
        with pytest.raises(rc.BudgetError, match="too small"):
            split_of(module, 0.8)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("share", [1.0, 0.9])
@pytest.mark.parametrize("layer", ["counting", "halves"])
def test_the_backward_reads_what_a_buffer_was_before_it_changed(layer: str, share: float) -> None:
    """Though inductor takes the copy of it for one that changes nothing, and torch's own split reads the new one."""
    found = within([layer, "conv", "gelu", "conv"], share, compiler="inductor")
    assert found is not None
    expected, results, plan = found
    assert near(expected, results)
    assert plan.split == "planned"


@pytest.mark.usefixtures("unfused")
def test_a_pointwise_chain_is_one_kernel() -> None:
    """Three layers are products, and a chain after each; the last chain is inside of the loss."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU(), nn.Tanh()) for _ in range(3)]
    step = by_inductor(Mean(*layers), 1.0)
    step(torch.randn(256, 32)).backward()
    forward, backward = 3 + 2 + 1, 3 + 5  # the input of the first layer has no gradient
    assert rt.plans(step)[0].operators == forward + backward


@pytest.mark.usefixtures("unfused")
def test_too_little_is_refused_before_training() -> None:
    """The error says the least that works, and that works."""
    module = network(DEEP)
    with pytest.raises(rc.BudgetError, match="the least that a plan was found for is") as caught:
        left(module, by_inductor(module, 1000), image())
    least = int(str(caught.value).split("(")[1].split(" bytes")[0])
    assert split_of(module, least).planned <= least


@pytest.mark.parametrize("layers", [["linear", "glu", "counting"], ["group norm", "conv"]], ids=["linear", "norm"])
def test_the_least_that_an_error_says_is_what_kernels_take(
    layers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not what a plan takes before it is made of kernels, which take more here: that budget was refused, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor, "compile_fx_inner", lambda graph, given, **_: boxed_nop(graph, given))
    monkeypatch.setattr(inductor.Rehearsal, "peak", lambda _: None)
    module = network(layers)
    with pytest.raises(rc.BudgetError, match="the least that a plan was found for is") as caught:
        left(module, by_inductor(module, 1000), image())
    least = int(str(caught.value).split("(")[1].split(" bytes")[0])
    assert split_of(module, least).planned <= least


@pytest.mark.usefixtures("unfused")
def test_without_gradients_nothing_is_planned() -> None:
    """Inference runs as it is."""
    module = network(["conv", "gelu"]).eval()
    step = by_inductor(module, 1)
    with torch.no_grad():
        assert near([step(image())], [module(image())])
    assert "run a step" in str(rt.plans(step))


def has_compiler() -> bool:
    try:
        return shutil.which(cpp_builder.get_cpp_compiler()) is not None
    except Exception:  # of inductor: InvalidCxxCompiler
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler, and none is found")
def test_gradients_are_those_of_inductor_without_a_budget() -> None:
    """To the bit where the split is the same, else but for rounding; dropout draws the same, and the peak holds."""
    given = torch.randn(256, 32)
    modules, steps, found = [], [], []
    for budget in (None, 1.0, 0.8):
        torch.manual_seed(0)
        layers = [[nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.GELU()] for _ in range(2)]
        modules.append(Mean(*layers[0], *layers[1]))
        torch.compiler.reset()
        steps.append(torch.compile(modules[-1]) if budget is None else by_inductor(modules[-1], budget))
        found.append(left(modules[-1], steps[-1], given))
    plain, default, tight = found
    (plan,) = rt.plans(steps[-1])
    assert same(plain, default)
    assert near(plain, tight)
    assert plan.split == "planned"
    assert plan.peak is not None
    assert plan.peak <= plan.budget


class Gated(nn.Module):
    """As a block of a language model: one input for several products, which are multiplied."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.products = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(7)])

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four, five, six, seven = self.products
        y = self.norms[0](x)
        x = x + four(functional.silu(one(y)) * two(y) * torch.sigmoid(three(y)))
        y = self.norms[1](x)
        found: Tensor = x + seven(functional.silu(five(y)) * six(y))
        return found


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler, and none is found")
@pytest.mark.parametrize("which", ["fused", "read in part"])
def test_peaks_are_known_before_code_is_made(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is compiled once: its estimate is what kernels take, though they are fused, and so run in another order

    than that of the plan, and though they read only a part of what the forward has saved.
    """
    compilations: list[int | None] = []
    peak = inductor.Rehearsal.peak
    monkeypatch.setattr(inductor.Rehearsal, "peak", lambda given: compilations.append(peak(given)) or compilations[-1])
    torch.manual_seed(0)
    if which == "fused":
        module, share, example = Mean(*[Gated() for _ in range(2)]), 0.6, torch.randn(8, 64, 64)
    else:
        module, share, example = network(["linear", "linear", "in place", "glu"]), 0.9, image()
    step = by_inductor(module, share)
    left(module, step, example, steps=1)
    (plan,) = rt.plans(step)
    assert len(compilations) == 1
    assert plan.split == "planned"
    assert plan.peak is not None
    assert plan.peak == plan.planned <= plan.budget


STEP = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters
from recompute import planners
import recompute_torch as rt

def refuse(*_, **__):
    raise AssertionError("it plans again")

if sys.argv[1] == "again":
    planners.plan = planners.replan = refuse
torch.manual_seed(0)
module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])
step = rt.compile(lambda x: module(x).square().mean(), of_peak=0.7, compiler="inductor", effort=0.03)
step(torch.randn(256, 32)).backward()
(plan,) = rt.plans(step)
told = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
told |= {"split": plan.split, "peak": plan.peak, "gradients": [weight.grad.tolist() for weight in module.parameters()]}
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler, and none is found")
def test_a_second_process_plans_and_compiles_nothing(tmp_path: Path) -> None:
    """Plans are kept beside inductor's cache, which knows a planned graph again; results are the same."""

    def told(how: str) -> dict[str, Any]:
        given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", STEP, how], env=given, capture_output=True, text=True, check=True, timeout=600
        )
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return found

    first, second = told("first"), told("again")
    assert (first["split"], first["miss"], first["hit"]) == ("planned", 2, 0)
    assert second == {**first, "miss": 0, "hit": 2}


def test_what_was_kept_is_read_or_passed_over(tmp_path: Path) -> None:
    """A plan for the same budget takes the place of the old one; a file that cannot be read is none."""
    program = Program("step")
    one, two = Scheduled(10, 0.1, (0, 1, 0), 8, 9), Scheduled(10, 0.1, (0, 1), 2, 8)
    for plan in (one, two):
        inductor.keep_scheduled(program, str(tmp_path), plan)
        assert inductor.scheduled(program, str(tmp_path)) == [plan]
    (file,) = (tmp_path / "recompute").iterdir()
    file.write_text("[{}]", encoding="utf-8")
    assert inductor.scheduled(program, str(tmp_path)) == []


def test_afterwards_inductor_fuses_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it had not chosen anything before, as in a new process or thread."""
    monkeypatch.delattr(virtualized.threadlocal, virtualized._choices._key, raising=False)
    with peak.fused_nearby(2):
        assert type(virtualized.V.choices) is not InductorChoices
    assert type(virtualized.V.choices) is InductorChoices


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler, and none is found")
def test_what_inductor_takes_by_itself_is_enough() -> None:
    """Its real peak is below what the graph says, since kernels write over what they have just read; it is known."""
    torch.manual_seed(0)
    given = torch.randn(8, 64, 64)
    module = Mean(*[Gated() for _ in range(2)])
    step = by_inductor(module, 1.0)
    left(module, step, given, steps=1)
    own = rt.plans(step)[0].peak
    assert own is not None
    assert own < rt.plans(step)[0].planned
    step = by_inductor(module, own)
    left(module, step, given, steps=1)
    (plan,) = rt.plans(step)
    assert plan.peak == plan.planned == own


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler, and none is found")
@pytest.mark.parametrize(
    ("channels", "length", "share", "dynamic"), [(32, 48, 0.7, False), (192, 6, 0.98, False), (32, 48, 0.7, True)]
)
def test_convolutions_need_what_they_do_in_inductors_layout(
    channels: int, length: int, share: float, dynamic: bool
) -> None:
    """They run with channels last, where they need little memory of their own, and weights are copied for that.

    Both are known before code is made, as are what the backward gets in that layout and what it writes over; so they
    are where shapes may change.
    """
    torch.manual_seed(0)
    conv = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(4)]
    layers = [[convolution, nn.BatchNorm2d(channels), nn.ReLU()] for convolution in conv]
    module = Mean(*[layer for group in layers for layer in group])
    step = by_inductor(module, 1.0)
    left(module, step, torch.randn(4, channels, length, length, requires_grad=True), steps=1)
    (plan,) = rt.plans(step)
    assert plan.peak is not None
    assert plan.peak <= 1.05 * plan.planned
    assert plan.planned <= 1.15 * plan.peak
    step = by_inductor(module, share, dynamic=dynamic)
    left(module, step, torch.randn(4, channels, length, length, requires_grad=True), steps=1)
    (plan,) = rt.plans(step)
    assert plan.split == "planned"
    assert plan.peak == pytest.approx(plan.planned, rel=0.001)
