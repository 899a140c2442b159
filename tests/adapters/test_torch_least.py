"""What a training needs, before it begins and while it runs: floor, net budgets, small tensors, honest errors."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch import nn  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402  # the same
import recompute_torch as rt  # noqa: E402  # the same

pytestmark = pytest.mark.usefixtures("path")

WIDTH, DEPTH, BATCH = 32, 6, 256
PARAMETERS = 4 * DEPTH * (WIDTH * WIDTH + WIDTH + 2 * WIDTH)
"""Bytes, batch norm included."""

OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "SGD": (lambda parameters: torch.optim.SGD(parameters, 1e-3), 0),
    "momentum": (lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9), 1),
    "AdamW": (lambda parameters: torch.optim.AdamW(parameters, 1e-3), 2),
}
"""And how often they remember as much as there are parameters."""


class Training:
    """A network with everything that a step changes: buffers, momenta, a schedule, random numbers."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        layers = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1)] for _ in range(DEPTH)]
        self.model = nn.Sequential(*[layer for block in layers for layer in block])
        self.optimizer = OPTIMIZERS[optimizer][0](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self) -> None:
        """One step of it."""
        x = torch.randn(BATCH, WIDTH) * random.random()
        loss = (self.model(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        """All that a step changes, copied."""
        found: dict[str, Any] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        found |= {
            f"{name}.grad": None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
        }
        for number, memory in enumerate(self.optimizer.state.values()):
            found |= {f"{number}.{name}": torch.as_tensor(value).clone() for name, value in memory.items()}
        found["rate"] = self.optimizer.param_groups[0]["lr"]
        found["schedule"] = self.schedule.last_epoch
        found["random"] = torch.get_rng_state(), random.getstate()
        return found


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def needs(optimizer: str) -> rt.Least:
    """Of a training with this optimizer, on the path of the test."""
    return on_path(optimizer, rt.budget().path)


@cache
def on_path(optimizer: str, path: str) -> rt.Least:
    """The same."""
    return rt.least(Training(optimizer).step)


def trained(training: Training, steps: int, **options: Any) -> rt.budget:
    """Some steps in a block."""
    with rt.budget(**options) if "budget" not in options else rt.budget(options["budget"]) as block:
        for _ in range(steps):
            training.step()
    return block


def unwarned(training: Training, budget: int) -> None:
    """Three steps within a budget, whatever is said of it after the first one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rt.FloorWarning)
        trained(training, 3, budget=budget)


@pytest.mark.parametrize("before", [0, 3])
def test_nothing_is_changed(before: int) -> None:
    """Parameters, buffers, gradients, momenta, schedules and random numbers are as they were, and training goes on."""
    training, other = Training(), Training()
    for subject in (training, other):
        torch.manual_seed(1)
        random.seed(1)
        for _ in range(before):
            subject.step()
    known = training.state()
    rt.least(training.step)
    assert same(training.state(), known)
    training.step()
    torch.set_rng_state(known["random"][0])
    random.setstate(known["random"][1])
    other.step()
    assert same(training.state(), other.state())


def test_nothing_is_changed_by_a_step_that_fails() -> None:
    """Its error comes through, and what it had changed by then is put back."""
    training = Training()
    known = training.state()

    def failing() -> None:
        training.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rt.least(failing)
    assert same(training.state(), known)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts(name: str) -> None:
    """Parameters, gradients and what the optimizer remembers are what they are; the peak is that of a block."""
    found = needs(name)
    memory = OPTIMIZERS[name][1] * PARAMETERS
    assert found.parts.parameters == PARAMETERS
    assert found.parts.gradients <= PARAMETERS
    assert memory <= found.parts.optimizer <= memory * 1.05
    assert found.parts.total <= found.floor <= found.peak
    assert found.peak == trained(Training(name), 2).stats().peak


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_floor_works(name: str) -> None:
    """A training runs in a little more than its floor, and finds no room below the sum of the parts."""
    found = needs(name)
    stats = trained(Training(name), 3, budget=int(found.floor * 1.1)).stats()
    assert stats.rematerializations > 0
    assert stats.peak <= found.floor * 1.1 + stats.overshoot
    with pytest.raises(rc.BudgetError):
        unwarned(Training(name), found.parts.total - 1)


def test_the_curve() -> None:
    """Budgets rise from the floor to the peak, where nothing is repeated; each says what it would cost."""
    found = needs("AdamW")
    budgets = [budget for budget, _ in found.curve]
    assert budgets == sorted(budgets)
    assert (budgets[0], found.curve[-1]) == (found.floor, (found.peak, 1.0))
    assert all(overhead >= 1 for _, overhead in found.curve)
    assert (found.budget(0), found.budget(1), found.budget(between="100%")) == (found.floor, found.peak, found.peak)
    with pytest.raises(ValueError, match="the peak"):
        found.budget(2)
    assert "optimizer" in str(found)
    assert "<table>" in found._repr_html_()


def test_a_step_that_is_none() -> None:
    """A function that makes no tensors, and no steps at all, are errors that say what to give."""
    with pytest.raises(ValueError, match="one step of the training"):
        rt.least(lambda: None)
    with pytest.raises(ValueError, match="at least 1"):
        rt.least(Training().step, steps=0)


def test_least_within_a_budget() -> None:
    """The steps can be tried where they do not fit: peak and floor are as without a limit."""
    found = rt.least(Training().step, budget=int(needs("AdamW").peak * 0.6))
    assert found.peak >= needs("AdamW").peak * 0.9
    assert found.parts.parameters == PARAMETERS


def test_the_error_says_what_is_needed(path: str) -> None:
    """Too small a budget: the sum that is needed, its parts and the operator; with the sum that operator finds room."""
    training = Training()
    with pytest.raises(rc.BudgetError) as error:
        unwarned(training, needs("AdamW").parts.total - 1)
    text = str(error.value)
    found = re.search(
        r"needs at least .*?\((\d+) bytes\) on cpu: parameters .*, gradients .*, optimizer .* for aten", text
    )
    assert found is not None, text
    assert int(found[1]) == error.value.needed
    assert "rt.least(step)" in text


def test_a_warning_before_the_second_step(path: str) -> None:
    """When the optimizer remembers something for the first time, it is said that the next step cannot work."""
    x = torch.randn(256, 64)
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)
    with rt.budget(540_000):  # 131 kB of parameters, as much of gradients and of momenta, and 65 kB an activation
        module(x).square().sum().backward()
        with pytest.warns(rt.FloorWarning, match=r"optimizer 131 kB.* for aten"):
            optimizer.step()
        with pytest.raises(rc.BudgetError, match="optimizer 131 kB"):
            module(x).square().sum().backward()


@pytest.mark.parametrize(
    ("batch", "layers", "budget"),
    [
        (
            512,
            [(64, 512), (512, 64), (64, 2048)],
            13_600_000,
        ),  # at the loss: 4.2 MB three times, and parameters
        (512, [(64, 2048)], 13_600_000),  # its own gradient is .5 MB of what the tightest operator makes
        (128, [(512, 1024)], 6_800_000),  # 2.1 MB of parameters, their gradient, and twice what the layer makes
    ],
)
def test_no_warning_of_gradients_that_are_not_there_yet(
    path: str, batch: int, layers: list[tuple[int, int]], budget: int
) -> None:
    """A budget that works is not warned of: gradients count where they are there, and once."""
    x, y = torch.randn(batch, layers[0][0]), torch.randint(0, layers[-1][1], (batch,))
    module = nn.Sequential(*[nn.Linear(*sizes) for sizes in layers])
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rt.FloorWarning)
        with rt.budget(budget) as block:
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x), y).backward()
                optimizer.step()
    assert block.stats().overshoot == 0
    assert block.stats().path == path


@pytest.mark.parametrize("activations", ["300kB", "50%"])
def test_activations(activations: str) -> None:
    """A budget for activations alone leaves room for what has to stay, and the steps are those of plain torch."""
    plain, training = Training(), Training()
    for _ in range(3):
        plain.step()
    torch.manual_seed(0)
    known = plain.state()
    random.seed(2)
    torch.manual_seed(2)
    plain, training = Training(), Training()
    for subject in (plain, training):
        random.seed(2)
        torch.manual_seed(2)
        if subject is plain:
            for _ in range(4):
                subject.step()
        else:
            block = trained(subject, 4, activations=activations)
    assert same(training.state(), plain.state())
    assert not same(training.state(), known)
    steps = block._steps
    whole = trained(Training(), 2).stats().peak
    stays = (4 * PARAMETERS) * 1.02
    room = 300_000 if activations == "300kB" else 0.5 * whole
    assert steps[-1].peak <= stays + room
    assert steps[-1].repeated > 0
    assert (steps[0].peak > steps[-1].peak) == (activations == "50%")


def test_a_budget_or_activations() -> None:
    """Only one of the two can be given, and a setter takes the place of either."""
    with pytest.raises(TypeError, match="not both"):
        rt.budget("1MB", activations="1MB")
    with rt.budget(activations="1MB") as block:
        assert (torch.ones(100) * 2).sum() == 200
        block.budget = "2MB"
        assert block.budget == 2_000_000


def test_small_tensors_are_left_alone() -> None:
    """What is smaller than `smallest` is not evicted to make room."""
    with rt.budget(40_000, smallest="1kB", native=False) as block:
        small = [torch.ones(100) * number for number in range(20)]
        large = [torch.ones(1_000) * number for number in range(20)]
        there = [tensor.untyped_storage for tensor in small]
        assert len(there) == 20
        assert all(handle_of(tensor).resident for tensor in small)
        assert sum(handle_of(tensor).resident for tensor in large) < 10
        assert [float(tensor[0]) for tensor in small + large] == [*range(20), *range(20)]
    assert block.stats().peak <= 40_000


def handle_of(tensor: Any) -> Any:
    """What the cache knows of a tensor."""
    from recompute_torch._escapes import handle_of

    return handle_of(tensor)


SCRIPT = """
import resource, sys, torch
import recompute_torch as rt
x = torch.ones(4_000_000)
make = eval("lambda number: " + sys.argv[1])
torch.manual_seed(0)
expected = [float(make(number)[0]) for number in range(60)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000, resource.RLIM_INFINITY))
torch.manual_seed(0)
with rt.budget(sys.argv[2]) as block:
    kept = [make(number) for number in range(60)]
    found = [float(tensor[0]) for tensor in kept]
    stats = block.stats()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(found == expected, stats.evictions > 0, stats.rematerializations > 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of a process is Linux's")
@pytest.mark.parametrize(
    ("made", "budget"),
    [
        ("x * number", "auto"),
        ("torch.rand(4_000_000)", "auto"),
        ("torch.empty_like(x).fill_(number)", "auto"),
        ("x * number", "10GB"),
    ],
)
def test_memory_of_the_machine(made: str, budget: str) -> None:
    """Tensors are evicted when an allocation fails in any budget, for whatever operator, and it is tried again."""
    given_back = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "1000000",
    }  # else the C library keeps what is freed
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, made, budget], capture_output=True, text=True, check=False, env=given_back
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


@pytest.mark.parametrize("foreach", [True, False])
def test_momenta_keep_no_gradients(foreach: bool) -> None:
    """Between the first two steps there are parameters and momenta, and no gradients that momenta were cloned from."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9, foreach=foreach)
    x = torch.randn(2, 64)
    parameters = 4 * 64 * 64 * 4
    with rt.budget() as block:
        for _ in range(3):
            optimizer.zero_grad()
            between = block.stats().used
            module(x).square().sum().backward()
            optimizer.step()
    assert 2 * parameters <= between <= 2.1 * parameters
