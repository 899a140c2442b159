"""Faults in the middle of a training: the block goes on or is left, and the tensors have content that they may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from interrupts import Interrupts

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_steps import Training, Watching  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402
import recompute_torch as rt  # noqa: E402
from recompute.testing import check_invariants  # noqa: E402
from recompute_torch import _block  # noqa: E402

STRIDE = 3  # of the crossings at which an interrupt strikes
BUDGET = 2_000


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, set[bytes]], list[torch.Tensor]]:
    """All that is ever in the tensors of two steps of plain torch, and the activations that they keep."""
    training = Training()
    with Watching(training) as watching:
        training.step(1)
        training.step(2)
    watching.look()
    return watching.seen, training.kept


def go_on(block: rt.budget, training: Training, allowed: dict[str, set[bytes]]) -> Training:
    """After a fault the training has content that it may have, and goes on; how it was when it went on."""
    check_invariants(block.cache, [each._recompute for each in block._tracker.known()])
    block.budget = None  # as it was, the fault may have come of it
    copied = training.copied()
    training.step(3)
    del training.kept[-2:]
    block.cache.release_memory()
    for name, content in copied.contents().items():
        assert content in allowed[name], name
    return copied


def check_left(block: rt.budget, training: Training, copied: Training, kept: list[torch.Tensor]) -> None:
    """After the block all is ordinary, and the steps that were made inside and after it are those of plain torch."""
    assert not block.stats().used
    for each in [*training.state().values(), *training.kept]:
        assert not hasattr(each.untyped_storage(), "_recompute")
    for one, other in zip(training.kept, kept, strict=False):
        assert torch.equal(one, other)
    copied.step(3)
    assert training.contents() == copied.contents()
    training.step(4)
    copied.step(4)
    assert training.contents() == copied.contents()


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    """The mode lets interrupts in, before and after what it does for an operator."""
    wanted = Interrupts()
    wanted.let_in(monkeypatch, [_block._Mode], lambda method, name: name == "__torch_dispatch__")
    yield wanted
    wanted.arm(0)


def test_an_interrupt_between_operators(interrupts: Interrupts, plain: Any) -> None:
    """Before or after any operator of forward, backward or the optimizer: training goes on as plain torch does."""
    interrupts.arm(0)
    with rt.budget(BUDGET) as block:
        training = Training()
        training.step(1)
        training.step(2)
    assert block.stats().rematerializations
    struck = 0
    for crossing in range(1, interrupts.crossings, STRIDE):
        training = Training()
        with rt.budget(BUDGET) as block:
            interrupts.arm(crossing)
            try:
                training.step(1)
                training.step(2)
            except KeyboardInterrupt:
                struck += 1
            interrupts.arm(0)
            copied = go_on(block, training, plain[0])
        check_left(block, training, copied, plain[1])
    assert struck > 50


def failing(*_: Any) -> None:
    raise ZeroDivisionError("a fault of the program")


def in_a_hook_of_a_tensor(training: Training) -> Any:
    return training.model[4].weight.register_hook(failing)


def in_a_hook_of_the_forward(training: Training) -> Any:
    return training.model[1].register_forward_hook(failing)


def in_a_hook_of_the_backward(training: Training) -> Any:
    return training.model[3].register_full_backward_hook(failing)


def in_a_hook_after_accumulation(training: Training) -> Any:
    return training.model[0].bias.register_post_accumulate_grad_hook(failing)


def in_a_hook_of_the_optimizer(training: Training) -> Any:
    return training.optimizer.register_step_post_hook(failing)


@pytest.mark.parametrize(
    "place",
    [
        in_a_hook_of_a_tensor,
        in_a_hook_of_the_forward,
        in_a_hook_of_the_backward,
        in_a_hook_after_accumulation,
        in_a_hook_of_the_optimizer,
    ],
)
def test_an_exception_in_a_hook(place: Any, plain: Any) -> None:
    """It comes out as it is, and training goes on as plain torch does."""
    training = Training()
    with rt.budget(BUDGET) as block:
        hook = place(training)
        with pytest.raises(ZeroDivisionError, match="a fault of the program"):
            training.step(1)
        hook.remove()
        block.cache.release_memory()
        copied = go_on(block, training, plain[0])
    check_left(block, training, copied, plain[1])


@pytest.mark.parametrize("budget", range(200, 2_000, 75))
def test_too_small_a_budget_anywhere(budget: int, plain: Any) -> None:
    """A BudgetError, in the middle of backward too, leaves a training that goes on with a larger budget."""
    training = Training()
    with rt.budget(budget) as block:
        try:
            training.step(1)
            training.step(2)
        except rc.BudgetError:
            block.cache.release_memory()
        copied = go_on(block, training, plain[0])
    check_left(block, training, copied, plain[1])


@pytest.mark.parametrize("made_here", [True, False])
def test_an_operator_that_fails_after_it_has_begun_to_write(made_here: bool) -> None:
    """What it has written stays, as in plain torch, and what was made from the tensor before is not touched."""
    outside = torch.zeros(6)

    def half_written(start: torch.Tensor) -> list[torch.Tensor]:
        target = start + 1 if made_here else start
        before = target * 2
        with pytest.raises((IndexError, RuntimeError)):
            target.scatter_(0, torch.tensor([0, 1, 2, 99]), 7.0)
        return [target, before, target + before]

    wanted = half_written(outside.clone())
    with rt.budget() as block:
        found = half_written(outside)
        block.cache.release_memory()
        assert torch.equal(found[0], wanted[0])
        block.cache.release_memory()
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)
    assert not block.stats().used
