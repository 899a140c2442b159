"""Blocks with a budget that holds while a program runs: one interface, whatever the framework."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import recompute as rc
from interrupts import COMPILED, struck


def with_torch() -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The block, and some work for it."""
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    from recompute_torch import budget

    return budget, lambda: torch.ones(1000).exp().sum().item()


def with_torch_below_python() -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The same on the native path."""
    budget, work = with_torch()
    from recompute_torch._native.build import status

    if status().reason:
        pytest.skip(str(status()))
    return partial(budget, native=True), work


def with_jax() -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The same."""
    jax = pytest.importorskip("jax", reason="the extra 'jax' is not installed")
    from recompute_jax import budget

    return budget, lambda: jax.numpy.ones(1000).sum().item()


def with_dask() -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The same."""
    pytest.importorskip("dask", reason="the extra 'dask' is not installed")
    da = pytest.importorskip("dask.array")
    from recompute_dask import budget

    return budget, lambda: da.ones(1000, chunks=500).sum().compute()


@pytest.mark.parametrize("adapter", [with_torch, with_torch_below_python, with_dask])
def test_a_block_has_a_budget_statistics_and_a_report(adapter: Callable[[], Any]) -> None:
    """The budget is bytes, and can be changed inside; statistics are those of a cache; what has no sense is refused."""
    budget, work = adapter()
    with budget("10MB") as block:
        assert block.budget == 10_000_000
        work()
        stats = block.stats()
        assert isinstance(stats, rc.Stats)
        assert stats.operations > 0
        assert stats.peak <= 10_000_000 + stats.overshoot
        assert "peak" in str(block.report())
        assert str(block) == str(block.report())
        block.budget = "20MB"
        assert block.budget == 20_000_000
        work()
        assert block.stats().budget == 20_000_000
        with pytest.raises(ValueError, match="much"):
            block.budget = "much"
        assert block.budget == 20_000_000
    with pytest.raises(ValueError, match="much"):
        budget("much")


@pytest.mark.skipif(not COMPILED, reason="in the plain form a signal can come before a block has been left")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in callbacks of a WeakSet
@pytest.mark.parametrize("adapter", [with_torch, with_torch_below_python, with_jax])
def test_no_signal_leaves_a_block_open(adapter: Callable[[], Any]) -> None:
    """Wherever it strikes as one is entered and left, it counts no work that follows, and another one can begin."""

    class Halt(BaseException):
        pass

    def enter_and_leave() -> None:
        blocks[:] = [budget()]  # with a budget, one that is not entered would be warned of later
        with blocks[0]:
            pass

    budget, work = adapter()
    blocks: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)
    for _ in struck(enter_and_leave, 300, 0.0007, Halt):
        operations = [block.stats().operations for block in blocks]
        work()
        assert [block.stats().operations for block in blocks] == operations
        assert signal.getsignal(signal.SIGINT) is handler
        enter_and_leave()
