"""Operations of `rc.ap` that draw from generators of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import recompute as rc

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

pytestmark = pytest.mark.usefixtures("path")

GENERATOR = torch.Generator().manual_seed(3)


class Owner:
    """Has a generator in an attribute."""

    def __init__(self) -> None:
        self.generator = GENERATOR

    def draw(self) -> Any:
        return torch.randn(3, generator=self.generator)


def from_the_default_one() -> Any:
    return torch.randn(3)


def by_dropout() -> Any:
    return torch.nn.functional.dropout(torch.ones(64), 0.5)


WAYS: dict[str, Callable[[], Any]] = {
    "as an argument": lambda: rc.ap(torch.randn, 3, generator=GENERATOR),
    "in an attribute": lambda: rc.ap(Owner().draw),
    "as a global": lambda: rc.ap(lambda: torch.rand(3, generator=GENERATOR)),
    "the default one": lambda: rc.ap(torch.randn, 3),
    "the default one, by name": lambda: rc.ap(from_the_default_one),
    "the default one, in a function of torch": lambda: rc.ap(by_dropout),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_repeated_run_draws_what_the_first_one_drew(way: str) -> None:
    """However the generator is held; and it leaves all generators as it found them."""
    with rc.Cache("100kB"):
        value = WAYS[way]()
        first = value.get().clone()
        torch.rand(5)
        torch.rand(5, generator=GENERATOR)
        before = torch.get_rng_state(), GENERATOR.get_state()
        assert value.evict()
        assert torch.equal(first, value.get())
        after = torch.get_rng_state(), GENERATOR.get_state()
        assert all(map(torch.equal, before, after))
