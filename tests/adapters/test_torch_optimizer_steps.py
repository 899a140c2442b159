"""What an optimizer makes for a moment is counted while it is there, and given back with its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_programs import check_records  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402

pytestmark = pytest.mark.usefixtures("path")

SIZE = 4_000
"""Bytes of a parameter."""


class Optimizer(torch.optim.Optimizer):
    """Makes all updates first, tells somebody, and remembers what was made last."""

    def __init__(self, parameters: list[Any], seen: Callable[[], None]) -> None:
        super().__init__(parameters, {})
        self._seen = seen

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Subtract half of the gradients."""
        parameters = self.param_groups[0]["params"]
        updates = [parameter.grad * 0.5 for parameter in parameters]
        self._seen()
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.sub_(update)
            self.state[parameter]["update"] = update


def trained(budget: int | None, seen: Callable[[rt.budget | None], None]) -> list[Any]:
    """Parameters and what was remembered after two steps, in a block if there is a budget."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.rand(SIZE // 4)) for _ in range(4)]
    block = None if budget is None else rt.budget(budget)
    optimizer = Optimizer(parameters, lambda: seen(block))

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            sum([(parameter * parameter).sum() for parameter in parameters]).backward()
            optimizer.step()

    if block is None:
        steps()
    else:
        with block:
            steps()
        assert block.stats().used == 0
    return [*parameters, *(optimizer.state[parameter]["update"] for parameter in parameters)]


@pytest.mark.parametrize("budget", [SIZE * 100, SIZE * 17])
def test_a_step_that_makes_all_updates_first(budget: int) -> None:
    """Every update is counted, within a large budget and one that has hardly room for them, and all bits are equal."""
    used = []

    def look(block: rt.budget | None) -> None:
        if block is not None:
            check_records(block)
            used.append(block.stats().used)

    plain = trained(None, look)
    found = trained(budget, look)
    assert [torch.equal(one, other) for one, other in zip(plain, found, strict=True)] == [True] * len(plain)
    assert 12 * SIZE <= used[0] <= budget
    assert 12 * SIZE <= used[1] <= budget
