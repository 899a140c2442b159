"""What a block says of itself: who holds memory, what each step took, and a warning in the words of a training."""

from __future__ import annotations

import gc
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch import nn  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402  # the same
import recompute_torch as rt  # noqa: E402  # the same
from recompute_torch._report import Watched  # noqa: E402  # the same

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = 4 * 8 * (32 * 32 + 32)


def training() -> tuple[Any, Any, Any]:
    """A network, its optimizer, and a function that makes one step."""
    torch.manual_seed(0)
    module = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())])
    optimizer = torch.optim.AdamW(module.parameters())
    x = torch.randn(256, 32)

    def step() -> None:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    return module, optimizer, step


@pytest.mark.parametrize("budget", [None, 300_000])
def test_what_holds_memory(budget: int | None, path: str) -> None:
    """Parameters, gradients, what the optimizer remembers, inputs and activations add up to what is used."""
    module, _, step = training()
    with rt.budget(budget) as block:
        step()
        x = torch.randn(256, 32)
        kept = [module(x)]
        kept.append(kept[0] * 2)
        report = block.report()
        sizes = {kind: holding.here for kind, holding in report.held.items()}
        assert (sizes["parameters"], sizes["gradients"]) == (PARAMETERS, PARAMETERS)
        assert 2 * PARAMETERS <= sizes["optimizer"] <= 2.1 * PARAMETERS
        assert sizes["inputs and others"] >= 256 * 32 * 4  # the batch of the step
        assert sum(sizes.values()) == report.stats.used
        alive = sizes["activations"] + report.held["activations"].gone
        assert alive >= 8 * 256 * 32 * 4
        assert (report.held["activations"].gone > 0) == (budget is not None)


def test_gradients_are_looked_at_where_they_are_written(path: str) -> None:
    """In another thread the report counts them as others: PyTorch may be writing them meanwhile."""
    _, _, step = training()
    there: list[rt.Report] = []
    with rt.budget() as block:
        step()
        thread = Thread(target=lambda: there.append(block.report()))
        thread.start()
        thread.join()
        here = block.report()
    assert (here.held["gradients"].here, there[0].held["gradients"].here) == (PARAMETERS, 0)
    assert there[0].held["parameters"].here == PARAMETERS


def test_memory_that_is_handed_out() -> None:
    """A tensor whose memory an array has is no longer in the budget, and the report says how much that is."""
    pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")
    with rt.budget(native=False) as block:
        x = torch.ones(1_000) * 2
        array = x.numpy()
        report = block.report()
        assert (report.handed_out, array[0]) == (4_000, 2)
        assert "4 kB" in str(report)
        del x, array
        gc.collect()
        assert block.report().handed_out == 0


def test_steps(path: str) -> None:
    """Each step has its own peak and counts, which add up to those of the block."""
    _, _, step = training()
    seen: list[rt.Step] = []
    with rt.budget(300_000) as block:
        block.on_step(seen.append)
        watched = Watched(block.on_step)
        for _ in range(3):
            step()
        metrics = watched.metrics()
        stats = block.stats()
        assert tuple(seen) == block.report().steps
    assert [step.number for step in seen] == [1, 2, 3]
    assert max(step.peak for step in seen) == stats.peak
    assert 0 <= stats.operations - sum(step.operations for step in seen) <= 1  # torch records the end of a step
    assert sum(step.repeated for step in seen) == stats.rematerializations > 0
    assert sum(step.repeated_compute for step in seen) == pytest.approx(stats.remat_time, rel=1e-3)
    assert metrics["memory/overhead"] == pytest.approx(stats.overhead, rel=0.05)
    assert metrics["memory/peak_bytes"] == stats.peak
    assert 0 < metrics["memory/repeated_share"] < 1 < metrics["memory/overhead"]
    assert watched.metrics() == {}


def test_a_block_prints(path: str) -> None:
    """`print(block)` shows who holds memory, the last steps, what is repeated most, and what more memory would give."""
    _, _, step = training()
    with rt.budget(300_000) as block:
        step()
        step()
        text = str(block)
        for expected in ("parameters", "gradients", "optimizer", "repeated most", "without eviction", "aten."):
            assert expected in text
        assert "<table>" in block._repr_html_()
    with rt.budget() as block:
        step()
        assert "without eviction" not in str(block)


@pytest.mark.filterwarnings("always::recompute.ThrashWarning")
def test_thrashing_is_said_in_the_words_of_a_training(path: str) -> None:
    """The warning comes once, names the operators, tells what to do about a block, and points to the program."""
    x = torch.randn(64, 64)

    def thrash() -> None:
        kept = [x]
        for _ in range(30):
            kept.append(kept[-1].matmul(x).tanh_())
        for _ in range(100_000):
            for tensor in reversed(kept):
                tensor.sum()
            if caught:
                break

    with rt.budget(4 * x.nbytes + 64) as block, pytest.warns(rc.ThrashWarning) as caught:
        thrash()
    (warning,) = [warning for warning in caught if warning.category is rc.ThrashWarning]
    assert "aten.mm" in str(warning.message)
    assert "print(block)" in str(warning.message)
    assert warning.filename == __file__
    assert block.stats().rematerializations > 0


def test_a_page_about_a_recorded_block(tmp_path: Path) -> None:
    """What each budget would cost, with the line of this library to paste; a block that records nothing says so."""
    with rt.budget("200 kB", trace=tmp_path / "run.jsonl") as block:
        weight = torch.ones(50, 50, requires_grad=True)
        x = torch.ones(50, 50)
        for _ in range(20):
            x = torch.tanh(x @ weight)
        x.sum().backward()
    block.report(html=tmp_path / "page.html")
    assert 'rt.budget(\\"' in (tmp_path / "page.html").read_text()
    with rt.budget("1MB") as plain, pytest.raises(ValueError, match="trace="):
        plain.report(html=tmp_path / "page.html")


def test_operators_are_of_the_program_s_line() -> None:
    """What a module or a backward pass calls is listed under the line of the program that called that."""
    module, _, _ = training()
    with rt.budget(None, native=False) as block:
        x = torch.randn(256, 32)
        loss = module(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # as torch has it
        places = {one.place for one in block.cache.memory() if not one.function.startswith("source")}
    assert places
    assert all(place.startswith(f"{__file__}:") for place in places)


def test_what_is_no_listener_and_no_path() -> None:
    """An error where they are given, not at the first step."""
    with pytest.raises(TypeError, match="takes a function of a Step, not 3"):
        rt.budget("2MB").on_step(3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="native is True, False or None, not 'yes'"):
        rt.budget("2MB", native="yes")  # type: ignore[arg-type]  # on purpose
