"""One training step, recorded and replayed: what the simulator says of budgets, and a picture of one of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _torch_measures import Make, begin

import recompute_torch as rt
from recompute import pictures
from recompute.events import Event
from recompute.simulator import baseline, simulate
from recompute.traces import read


def recorded(make: Make, shares: tuple[float, ...], picture: Path | None) -> dict[str, Any]:
    """Record the second step, so that gradients and what the optimizer remembers are as in all that follow."""
    task = begin(make)
    task.step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.jsonl"
        with rt.budget(None, trace=path) as block:
            task.step()
            peak = block.stats().peak
        program = read(path)
        size = path.stat().st_size
    runs = [simulate(program, of_peak=share) for share in shares]
    if picture is not None:
        events: list[Event] = []
        half = simulate(program, of_peak=0.5, listener=events.append)
        title = f"a step of a ResNet in half of its memory, overhead {half.overhead or 0:.2f}"
        pictures.save(
            pictures.residency(events, title=title, budget=half.budget_bytes, least=0.001, unit=program.unit), picture
        )
    return {
        "operations": len(program.calls),
        "bytes": size,
        "peak": peak,
        "baseline": baseline(program),
        "runs": [{"share": share, "status": run.status, "again": run.rematerializations, "overhead": run.overhead}
                 for share, run in zip(shares, runs, strict=True)],
    }  # fmt: skip
