"""Faults in the middle of a training: the block goes on or is left, and the tensors have content that they may have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_steps import BUDGET, Training, check_left, go_on  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402
import recompute_torch as rt  # noqa: E402

pytestmark = pytest.mark.usefixtures("path")


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


@pytest.mark.filterwarnings("ignore::recompute_torch.FloorWarning")
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
