"""PyTorch on a CUDA device: the same bits, a real peak, allocations that fail, streams. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch import nn  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # the same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WIDTH, DEPTH, BATCH = 256, 12, 4096


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)


class Training:
    """A network with dropout on the device, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.module = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    def steps(self, count: int) -> list[Any]:
        """Losses, and the parameters at the end."""
        losses = []
        for _ in range(count):
            x = torch.randn(BATCH, WIDTH, device="cuda")
            self.optimizer.zero_grad()
            loss = (self.module(x) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach().cpu())
        return [*losses, *[parameter.detach().cpu() for parameter in self.module.parameters()]]


def plainly(count: int = 3) -> tuple[list[Any], int]:
    """What it makes without a block, and the most bytes that the device had given out."""
    torch.cuda.reset_peak_memory_stats()
    found = Training().steps(count)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found, peak


def equal(one: list[Any], other: list[Any]) -> bool:
    """Whether all are the same, to the last bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_a_budget_changes_nothing(share: float) -> None:
    """Within a share of the peak the same steps are taken, and the device's own statistics agree with the budget."""
    expected, peak = plainly()
    training = Training()
    with rt.budget({"cuda:0": int(share * peak)}) as block:
        found = training.steps(3)
        stats = block.stats()
    assert equal(found, expected)
    assert stats.rematerializations > 0
    counted = next(pool for pool in stats.pools if pool.device == "cuda:0")
    assert counted.peak <= share * peak + counted.overshoot
    assert torch.cuda.max_memory_allocated() <= 1.1 * counted.peak + 2**25  # and workspaces


def test_auto() -> None:
    """In three quarters of the memory that it takes, allocations fail, and the steps are the same all the same."""
    expected, peak = plainly()
    training = Training()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 0.75 * peak / whole))
    with rt.budget("auto") as block:
        found = training.steps(3)
        assert block.stats().evictions > 0
    assert equal(found, expected)


def test_a_stream_of_its_own() -> None:
    """Steps on another stream are the same: what is evicted there is made again there."""
    expected, peak = plainly()
    training = Training()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), rt.budget({"cuda:0": int(0.6 * peak)}) as block:
        found = training.steps(3)
        assert block.stats().rematerializations > 0
    assert equal(found, expected)


def test_least() -> None:
    """The floor and the peak are those of the device, and nothing is changed."""
    training = Training()
    before = [parameter.clone() for parameter in training.module.parameters()]
    found = rt.least(lambda: training.steps(1))
    assert found.device == "cuda:0"
    assert found.parts.total <= found.floor < found.peak
    assert equal(before, list(training.module.parameters()))
    assert not training.optimizer.state
