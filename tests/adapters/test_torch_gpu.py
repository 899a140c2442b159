"""PyTorch on a CUDA device: the same bits, a real peak, allocations that fail, streams. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch import nn  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402  # the same
import recompute_torch as rt  # noqa: E402  # the same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WIDTH, DEPTH, BATCH = 256, 12, 4096


SLACK = 2**24
"""Bytes: what the allocator rounds up to, and blocks that an operator has for the moment."""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
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


def forget_workspaces() -> None:
    """Each stream has a workspace of cuBLAS of its own, which stays."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def plainly() -> tuple[list[Any], int, int]:
    """What three steps make without a block; the bytes of tensors at the peak, and what the device gave out beside."""
    forget_workspaces()
    expected = Training().steps(3)
    most = torch.cuda.max_memory_allocated()
    with rt.budget() as block:
        Training().steps(3)
        peak = pool_of(block).peak
    forget_workspaces()
    return expected, peak, most - peak


def pool_of(block: rt.budget) -> Any:
    """What is counted on the device."""
    return next(pool for pool in block.stats().pools if pool.device == "cuda:0")


def equal(one: list[Any], other: list[Any]) -> bool:
    """Whether all are the same, to the last bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_a_budget_changes_nothing(share: float) -> None:
    """Within a share of the peak the same steps are taken, and the device's own statistics agree with the budget."""
    expected, peak, beside = plainly()
    training = Training()
    with rt.budget({"cuda:0": int(share * peak)}) as block:
        found = training.steps(3)
        counted = pool_of(block)
        assert block.stats().rematerializations > 0
    assert equal(found, expected)
    assert counted.peak <= share * peak + counted.overshoot
    assert torch.cuda.max_memory_allocated() <= counted.peak + beside + SLACK


def test_a_share_of_the_activations() -> None:
    """It is of those on the device: what little lies beside them on the host, such as counters, is not limited."""
    expected, peak, _ = plainly()
    training = Training()
    with rt.budget(activations="50%") as block:
        found = training.steps(3)
        assert block.stats().rematerializations > 0
        assert block.report().steps[-1].peak < 0.7 * peak
    assert equal(found, expected)


def test_auto() -> None:
    """In two thirds of the memory for tensors allocations fail, and the steps are the same all the same."""
    expected, peak, beside = plainly()
    training = Training()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((0.67 * peak + beside) / whole)
    with rt.budget("auto") as block:
        found = training.steps(3)
        assert block.stats().evictions > 0
    assert equal(found, expected)


def test_a_stream_of_its_own() -> None:
    """Steps on another stream are the same: what is evicted there is made again there."""
    expected, peak, _ = plainly()
    training = Training()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), rt.budget({"cuda:0": int(0.6 * peak)}) as block:
        found = training.steps(3)
        assert block.stats().rematerializations > 0
    assert equal(found, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recurrent_networks(kind: Any, dropout: float) -> None:
    """What cuDNN drops is the same, though it draws from a tensor that it writes: such layers run once."""

    def trained(budget: int | None) -> tuple[list[Any], int, int]:
        torch.manual_seed(0)
        layers = [kind(64, 64, 2, dropout=dropout).cuda() for _ in range(6)]
        optimizer = torch.optim.AdamW([parameter for layer in layers for parameter in layer.parameters()])
        losses = []
        with rt.budget(budget) as block:
            for _ in range(3):
                start = x = torch.randn(40, 256, 64, device="cuda")
                for layer in layers:
                    x = (layer(x)[0].exp().exp() + start).tanh()
                optimizer.zero_grad()
                loss = (x - start).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().cpu())
            return losses, pool_of(block).peak, block.stats().rematerializations

    expected, peak, _ = trained(None)
    found, _, repeated = trained(int(0.9 * peak))
    assert equal(found, expected)
    assert repeated > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_moves_to_the_host(ahead: bool) -> None:
    """Within half of the memory the steps are the same if what is evicted moves to pinned memory of the host."""
    expected, peak, _ = plainly()
    training = Training()
    tiers = {"cuda:0": [rc.Host("4GB", always=True, ahead=ahead)]}
    with rt.budget({"cuda:0": int(0.5 * peak)}, tiers=tiers) as block:
        found = training.steps(3)
        assert block.stats().tiers[0].fetches > 0
    assert equal(found, expected)


def test_nothing_waits_for_the_device() -> None:
    """Evicting and making again launch kernels, and never wait until they are done."""
    _, peak, _ = plainly()
    training = Training()
    with rt.budget({"cuda:0": int(0.6 * peak)}) as block:
        training.steps(1)
        x = torch.randn(BATCH, WIDTH, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                training.optimizer.zero_grad()
                (training.module(x) - x).square().mean().backward()
                training.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert block.stats().rematerializations > 0


def test_a_graph_is_captured_before_a_block() -> None:
    """Inside of one, capturing is refused before it begins; what was made from memory that a replay writes stays."""
    with torch.no_grad():
        module, x = Training().module.eval(), torch.randn(BATCH, WIDTH, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            module(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        inputs = [torch.randn(BATCH, WIDTH, device="cuda") for _ in range(4)]
        expected = [module(one) * 2 for one in inputs]
        with rt.budget({"cuda:0": "200MB"}) as block:
            found = []
            for one in inputs:
                x.copy_(one)
                graph.replay()
                found.append(y * 2)
                block.cache.release_memory(device="cuda:0")
            assert equal(found, expected)
            with pytest.raises(RuntimeError, match="capture it before the block"), torch.cuda.graph(graph):
                pass
            assert not torch.cuda.is_current_stream_capturing()
            assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_least() -> None:
    """The floor and the peak are those of the device, and nothing is changed."""
    training = Training()
    before = [parameter.clone() for parameter in training.module.parameters()]
    found = rt.least(lambda: training.steps(1))
    assert found.device == "cuda:0"
    assert found.parts.total <= found.floor < found.peak
    assert equal(before, list(training.module.parameters()))
    assert not training.optimizer.state
