"""Lightning: a callback of `Trainer` that logs what a memory budget does.

block = rt.budget("5GB")
trainer = Trainer(callbacks=[BudgetCallback(block)], ...)
with block:
    trainer.fit(model, data)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from recompute_torch._block import budget
from recompute_torch._report import Watched


class BudgetCallback(Callback):  # type: ignore[misc]  # its types are not read: it need not be installed
    """Logs `memory/peak_bytes`, `memory/repeated_share` and `memory/overhead` of each batch."""

    def __init__(self, block: budget) -> None:
        self._watched = Watched(block.on_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What the steps took since this was last called."""
        metrics = self._watched.metrics()
        if metrics:  # with accumulated gradients not every batch ends with a step
            self.log_dict(metrics)
