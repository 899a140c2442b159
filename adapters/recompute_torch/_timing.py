"""What an operation on a GPU costs: two events around it, asked later; the host never waits."""

from __future__ import annotations

from collections.abc import Callable

import torch


def timer(device: str) -> Callable[[], Callable[[], float | None]] | None:
    """`Adapter.timer` for CUDA devices; None for others, whose operations are over when they return."""
    if not device.startswith("cuda"):
        return None
    stream = torch.cuda.current_stream(torch.device(device))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)

    def launched() -> Callable[[], float | None]:
        end.record(stream)
        return lambda: start.elapsed_time(end) / 1000 if end.query() else None

    return launched
