"""Hugging Face transformers: a callback of `Trainer` that logs what a memory budget does.

block = rt.budget("5GB")
trainer = Trainer(model, arguments, callbacks=[BudgetCallback(block)], ...)
with block:
    trainer.train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from recompute_torch._block import budget
from recompute_torch._report import Watched


class BudgetCallback(TrainerCallback):  # type: ignore[misc]  # its types are not read: it need not be installed
    """Adds `memory/peak_bytes`, `memory/repeated_share` and `memory/overhead` to what is logged."""

    def __init__(self, block: budget) -> None:
        self._watched = Watched(block.on_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        """What the steps took since this was last called."""
        metrics = self._watched.metrics()
        if logs is not None:
            logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)
