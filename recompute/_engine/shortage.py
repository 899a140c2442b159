"""What an error says when memory is short: what takes it, and what helps in this case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recompute._budget import format_bytes

if TYPE_CHECKING:
    from recompute._engine.graph import Operation
    from recompute._engine.pool import Pool


def said(pool: Pool, size: int, what: Operation | None, impossible: bool) -> str:
    """That `what` (None: a source) cannot have `size` more bytes. `impossible`: not even if all is evicted that can be.

    Without the lock: it names a function of the user's.
    """
    locked = max(0, pool.fixed - pool.sources - pool.pinned)
    parts = [
        (pool.sources, "in sources"),
        (pool.pinned, "pinned"),
        (locked, "locked by operations in flight"),
        (pool.held, "evicted but held by the caller"),
        (0 if impossible else pool.used - pool.fixed - pool.held, "that the policy does not evict"),
    ]
    short = (pool.fixed + pool.held if impossible else pool.used) + size - int(pool.limit)
    taken = ", ".join(f"{format_bytes(part)} {label}" for part, label in parts if part > 0)
    who = "a source" if what is None else f"{what.name} (created at {what.created})"
    limit = format_bytes(pool.limit)
    if size > pool.limit:
        whose = f"a source of {format_bytes(size)}" if what is None else f"{who} gives a result of {format_bytes(size)}"
        cure = (
            "let the cache make it, with rc.ap instead of rc.pure, in parts that fit"
            if what is None
            else "compute it in parts, each of them a value of its own"
        )
        verb = " is" if what is None else ", which is"
        return (
            f"{whose}{verb} larger than the whole budget of {limit} on {pool.device}: that is {format_bytes(short)} "
            f"({short} bytes) short" + (f", with {taken}" if taken else "") + f"; raise the budget, or {cure}"
        )
    need = f"{who} needs {format_bytes(size)} more on {pool.device}, but the" if size else "the"
    return (
        f"{need} budget of {limit} is {format_bytes(short)} ({short} bytes) short"
        + (f", with {taken}" if taken else "")
        + "; "
        + _listed(["raise the budget", *_cures(pool, what is None, locked)])
    )


def _cures(pool: Pool, source: bool, locked: int) -> list[str]:
    """What would make room, the most bytes first."""
    sources = (
        "load sources inside of an operation, rc.ap(load, path) instead of rc.pure(load(path)), wrap a plain array "
        "that is used again and again once, with rc.array, or give the cache a tier, which sources may move to"
    )
    cures = [
        (pool.sources, sources),
        (pool.pinned, "unpin() values"),
        (pool.held, "let go of what get() returned"),
        (locked, "let operations take and return less at a time"),
    ]
    if source and not pool.sources:
        cures.append((1, sources.partition(", wrap")[0]))
    return [cure for size, cure in sorted(cures, key=lambda one: -one[0]) if size > 0]


def _listed(cures: list[str]) -> str:
    return cures[0] if len(cures) == 1 else f"{'; '.join(cures[:-1])}; or {cures[-1]}"
