"""What a notebook shows of a `Recomputable`: how its value was made, what that costs, where it is."""

from __future__ import annotations

from recompute._budget import format_bytes
from recompute._engine.graph import Value
from recompute.text import Table, seconds

_MOST = 5  # arguments


def described(title: str, value: Value) -> Table:
    """A table of what is known without the value."""
    operation, storage = value.operation, value.storage
    pairs = [("size", format_bytes(storage.size))]
    if storage.pool is not None and storage.pool.device != "cpu":
        pairs.append(("device", storage.pool.device))
    if operation is None:
        pairs.append(("made by", "nothing: a source"))
    else:
        pairs.append(("made by", f"{operation.name}, {operation.created}"))
        taken = [_name(argument) for argument in operation.arguments[:_MOST]]
        if len(operation.arguments) > _MOST:
            taken.append(f"and {len(operation.arguments) - _MOST} more")
        pairs.append(("of", ", ".join(taken) or "plain arguments"))
        pairs.append(("cost", f"{seconds(operation.c0)}, run {times(operation.runs)}"))
    return Table(title, pairs)


def times(count: int) -> str:
    """Once, twice, or so many times."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _name(value: Value) -> str:
    operation = value.operation
    return f"{'source' if operation is None else operation.name} {value.number}"
