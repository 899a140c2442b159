"""`simulate` and `iterate`: the cost of a recorded program under another budget or policy, once or in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from time import perf_counter
from typing import Any, Final, Literal, TypedDict, Unpack

from recompute._budget import bytes_or_peak, parse_budget
from recompute._simulator.neighbourhoods import knows
from recompute._simulator.published_replay import PublishedReplay, baseline
from recompute._simulator.replay import Replay
from recompute._simulator.run import Counts, Run, Status, uncollected
from recompute._simulator.tier import SimulatedTier
from recompute._traces.program import Program
from recompute.events import Listener
from recompute.policies import DEFAULT, Policy, ReleaseMode, Search, policy_of

MachineName = Literal["published", "library"]

_PATIENT: Final = 20.0
"""Up to this overhead a round is run to its end, so that the next ones can learn from it."""

ByDevice = Mapping[str, int | str]
"""Device -> bytes."""


class Options(TypedDict, total=False):
    """Arguments of `simulate` and `iterate` by name: see `simulate`."""

    of_peak: float | str | None
    policy: str | Policy
    search: str | Search
    release: ReleaseMode
    limit: float
    machine: MachineName | None
    peak: Mapping[str, int] | None
    listener: Listener | None
    progress: Callable[[int], None] | None
    tier: SimulatedTier | str | None


def simulate(program: Program, budget: int | str | ByDevice | None = None, **options: Unpack[Options]) -> Run:
    """Replay a program under a budget: what would that have cost?

    Parameters
    ----------
    budget, of_peak
        Bytes for each device ("512MB"), or a mapping from device to bytes; or instead a share (0.4, "40%") of the peak
        of each device: of the bytes that a run without a budget has in use there at its worst moment (see `baseline`).
    policy, search, release
        As for `Cache`.
    limit
        The overhead above which the run is given up as thrashing: more than `limit` - 1 times the model time has been
        spent on recomputation. By default 2.0.
    machine
        "published": like the DTR authors' simulator, see `_simulator/published.py`; "library": the cache as it is. By
        default the published one for the published policies on published traces without a tier, else the library's.
    peak
        What `baseline` returned, if it was called.
    listener
        Called with the events of the cache.
    progress
        Called now and then with the number of steps done, of `len(program.steps)`.
    tier
        Where evicted bytes may go, as a `SimulatedTier` or as text: "12GB/s", or "12GB/s,overlap" when transfers do
        not stop the compute. You can add a latency ("1ms"), a limit ("50GB") and "always", to move whatever fits.

    Raises ValueError for a limit below 1, for what `Cache` does not take, and for what the published machine does not
    have: a tier, or a policy with a neighbourhood of this library's own.
    """
    (run,) = _replays(program, budget, None, None, options)
    return run


def iterate(
    program: Program,
    budget: int | str | ByDevice | None = None,
    *,
    iterations: int,
    foresight: bool = True,
    effort: float = 1.0,
    **options: Unpack[Options],
) -> Iterator[Run]:
    """Replay a program several times in one cache, as rounds of a program that repeats it: each run as it is ready.

    Between rounds all references are dropped, constants included. A run that does not fit is the last one; one above
    the limit is run to its end, so that the next one can learn from it. Parameters as of `simulate`, and

    foresight
        Whether the cache learns from one round for the next; only the default policy does.
    effort
        Effort for the plan of a round, for which the next round waits: 1 is about ten seconds.
    """
    if iterations < 1:
        raise ValueError(f"iterations is a number of rounds, at least 1, not {iterations!r}")
    if not 0 <= effort < inf:
        raise ValueError(f"effort is a number, 0 or more, not {effort!r}; 1 is about ten seconds")
    return _replays(program, budget, iterations, effort if foresight else None, options)


def by_amount(amount: int | float) -> dict[str, Any]:
    """The argument of `simulate` and `plan` for bytes (an int) or a share of the peak (a float)."""
    return {"of_peak": amount} if isinstance(amount, float) else {"budget": amount}


def budgets_of(
    peak: Mapping[str, int], budget: int | str | ByDevice | None = None, of_peak: float | str | None = None
) -> tuple[dict[str, int], float]:
    """Bytes by device, and which share of the whole peak they are."""
    if isinstance(budget, Mapping) and of_peak is None:
        sizes = {device: int(bytes_or_peak(amount, None)) for device, amount in budget.items()}
        return sizes, sum(sizes.values()) / max(1, sum(peak.values()))
    amount = bytes_or_peak(budget, of_peak)  # type: ignore[arg-type]  # a mapping and a share are too much: an error
    sizes = {device: parse_budget(amount, whole=whole) for device, whole in peak.items()}
    return sizes, amount if isinstance(amount, float) else sum(sizes.values()) / max(1, sum(peak.values()))


def _replays(
    program: Program,
    budget: int | str | ByDevice | None,
    iterations: int | None,
    effort: float | None,
    options: Options,
) -> Iterator[Run]:
    """The runs, as they become ready; wrong options are an error here and now. `iterations`: None for one."""
    limit = options.get("limit", 2.0)
    if not limit >= 1:
        raise ValueError(f"limit is an overhead, at least 1, not {limit!r}")
    peak = options.get("peak")
    peak = baseline(program) if peak is None else peak
    budgets, ratio = budgets_of(peak, budget, options.get("of_peak"))
    replay = _replay(program, budgets, options, limit if iterations is None else max(limit, _PATIENT), effort)
    policy, tier = options.get("policy", DEFAULT), options.get("tier")
    name = policy if isinstance(policy, str) else policy.name
    known = {
        "trace": program.name,
        "policy": name if tier is None else f"{name}, tier {tier}",
        "search": replay.search,
        "release": options.get("release", "eager"),
        "budget_bytes": sum(budgets.values()),
        "budget_ratio": ratio,
        "baseline_peak_bytes": sum(peak.values()),
        "model_time": program.model_time * program.unit,
    }

    def runs() -> Iterator[Run]:
        before = replay.counts()
        for iteration in range(1, 1 + (iterations or 1)):
            status, seconds = _timed(replay, options, again=iterations is not None)
            after = replay.counts()
            yield _run_of(program, status, before, after, limit, {**known, "seconds": seconds, "iteration": iteration})
            before = after
            if status != "ok":
                return

    return runs()


def _replay(
    program: Program, budgets: Mapping[str, int], options: Options, most: float, effort: float | None
) -> Replay | PublishedReplay:
    """Nothing has run yet. `most`: the overhead above which a run is given up; `effort` of plans, None: of none."""
    policy = policy_of(options.get("policy", DEFAULT))  # type: ignore[arg-type]  # any name, which is checked there
    machine, tier = options.get("machine"), options.get("tier")
    if machine is None:
        theirs = program.published and policy.published and knows(policy) and tier is None
        machine = "published" if theirs else "library"
    if machine == "published" and tier is not None:
        raise ValueError("the published machine has no tiers; leave either out: the machine, or the tier")
    same: dict[str, Any] = {
        "policy": policy,
        "search": options.get("search", "exact"),
        "release": options.get("release", "eager"),
        "limit": most,
    }
    if machine == "published":
        return PublishedReplay(program, budgets, **same)
    moving = SimulatedTier.read(tier) if isinstance(tier, str) else tier
    return Replay(program, budgets, effort=effort, tier=moving, **same)


def _timed(replay: Replay | PublishedReplay, options: Options, *, again: bool) -> tuple[Status, float]:
    """Replay the program, as the next round if it is done `again`; how that ended, and the seconds that it took."""
    listener, progress = options.get("listener"), options.get("progress")
    stop = None if listener is None else replay.subscribe(listener)
    start = perf_counter()
    try:
        with uncollected():
            status = replay.again(progress) if again else replay.run(progress)
    finally:
        seconds = perf_counter() - start
        if stop is not None:  # what goes with the replay afterwards is no step of it
            stop()
    return status, seconds


def _run_of(
    program: Program, status: Status, before: Counts, after: Counts, limit: float, known: dict[str, Any]
) -> Run:
    """The figures of one round, which is all that was done between two counts."""
    waited = after.waited - before.waited
    total = (after.model_time - before.model_time) + (after.remat_time - before.remat_time) + waited
    model = program.model_time
    if status == "ok" and total > limit * model:
        status = "thrash"
    return Run(
        **known,
        status=status,
        overhead=None if status != "ok" else total / model if model else 1.0,
        total_time=total * program.unit,
        peak_bytes=after.peak,
        evictions=after.evictions - before.evictions,
        rematerializations=after.rematerializations - before.rematerializations,
        candidates_scored=after.scored - before.scored,
        moved_bytes=after.written - before.written,
        fetched_bytes=after.read - before.read,
        waited_time=waited * program.unit,
    )
