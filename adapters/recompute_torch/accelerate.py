"""Hugging Face accelerate: what a memory budget does, for the trackers of an `Accelerator`.

accelerator = Accelerator(log_with="tensorboard")
with rt.budget("5GB") as block:
    log(accelerator, block)
    ...
"""

from __future__ import annotations

from accelerate import Accelerator

from recompute_torch._block import budget


def log(accelerator: Accelerator, block: budget, every: int = 1) -> None:
    """Log `memory/peak_bytes`, `memory/repeated_share` and `memory/overhead` after `every` so many steps."""
    if type(every) is not int or every < 1:
        raise ValueError(f"every is a number of steps, at least 1, not {every!r}")
    block.on_step(lambda step: step.number % every or accelerator.log(step.metrics(), step=step.number))
