"""The trainers of transformers, accelerate and Lightning log what a block did, and train as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch import nn  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # the same

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # these libraries' own

NAMES = {"memory/peak_bytes", "memory/repeated_share", "memory/overhead"}


def perceptron() -> Any:
    """A network of some layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])


def test_transformers(tmp_path: Path) -> None:
    """A callback of `Trainer` adds peak, repeated share and overhead to the log; losses are as without a budget."""
    transformers = pytest.importorskip("transformers", reason="the extra 'trainers' is not installed")
    from recompute_torch.transformers import BudgetCallback

    def trained(budget: int | None) -> tuple[list[dict[str, float]], int]:
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=3, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
        block = rt.budget(budget)
        generator = torch.Generator().manual_seed(0)
        data = [
            {"input_ids": tokens, "labels": tokens}
            for tokens in torch.randint(50, (32, 32), generator=generator).unbind()
        ]
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, max_steps=4, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[BudgetCallback(block)])
        with block:
            trainer.train()
        return trainer.state.log_history, block.stats().peak

    free, peak = trained(None)
    budget = int(0.7 * peak)
    logs, _ = trained(budget)
    steps = [entry for entry in logs if "loss" in entry]
    assert len(steps) == 4
    assert [step["loss"] for step in steps] == [entry["loss"] for entry in free if "loss" in entry]
    assert all(set(step) >= NAMES for step in steps)
    assert all(0 < step["memory/peak_bytes"] <= budget * 1.1 for step in steps)
    assert all(step["memory/overhead"] > 1 and step["memory/repeated_share"] > 0 for step in steps[1:])
    assert all(entry["memory/overhead"] == 1 for entry in free if "loss" in entry)


def test_accelerate() -> None:
    """The trackers of an `Accelerator` are told after each step of its optimizer."""
    pytest.importorskip("accelerate", reason="the extra 'trainers' is not installed")
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from recompute_torch.accelerate import log

    class Listing(GeneralTracker):  # type: ignore[misc]  # its types are not read
        name = "listing"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int, dict[str, float]]] = []

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **more: Any) -> None:
            assert step is not None
            self.logged.append((step, values))

    tracker = Listing()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("test")
    module = perceptron()
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    x = torch.randn(128, 32)
    with rt.budget(200_000) as block:
        log(accelerator, block)
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(module(x).square().mean())
            optimizer.step()
    assert [step for step, _ in tracker.logged] == [1, 2, 3]
    assert all(set(values) == NAMES for _, values in tracker.logged)
    assert all(0 < values["memory/peak_bytes"] <= 200_000 for _, values in tracker.logged)
    assert block.stats().rematerializations > 0


def test_lightning(tmp_path: Path) -> None:
    """A callback of its `Trainer` logs each step; parameters are as without a budget."""
    lightning = pytest.importorskip("lightning", reason="the extra 'trainers' is not installed")
    from recompute_torch.lightning import BudgetCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]  # its types are not read
        def __init__(self) -> None:
            super().__init__()
            self.module = perceptron()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.module(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    seen: list[dict[str, float]] = []

    class Reading(lightning.Callback):  # type: ignore[misc]  # its types are not read
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append({name: float(metric) for name, metric in trainer.callback_metrics.items()})

    def trained(budget: int | None) -> Any:
        module = Module()
        torch.manual_seed(1)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(512, 32)), batch_size=128)
        block = rt.budget(budget)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[BudgetCallback(block), Reading()],
        )  # fmt: skip
        with block:
            trainer.fit(module, data)
        return [parameter.detach() for parameter in module.parameters()], block.stats()

    free, whole = trained(None)
    budget = int(0.7 * whole.peak)
    found, stats = trained(budget)
    assert all(map(torch.equal, free, found))
    assert stats.rematerializations > 0
    assert [set(metrics) >= NAMES for metrics in seen] == [True, True]
    assert 0 < seen[1]["memory/peak_bytes"] <= budget + stats.overshoot
