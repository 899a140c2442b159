"""What a recorded program would have cost under another budget or policy: once, or round after round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from math import inf
from time import perf_counter
from typing import Final, Literal, TypedDict, Unpack

from recompute._budget import Amount, bytes_or_share, parse_budget
from recompute._simulator.replay import PublishedReplay, Replay, baseline
from recompute._simulator.run import Run, Status
from recompute._simulator.tier import SimulatedTier
from recompute._simulator.victims import knows
from recompute._traces.program import Program
from recompute.events import Listener
from recompute.policies import DEFAULT, Policy, ReleaseMode, Search, policy_of

MachineName = Literal["published", "library"]

_PATIENT: Final = 20.0
"""Up to this overhead a round is run to its end, so that the next ones can learn from it."""


class Options(TypedDict, total=False):
    """What `simulate` and `iterate` take by name: see `simulate`."""

    policy: str | Policy
    search: str | Search
    release: ReleaseMode
    limit: float
    machine: MachineName | None
    peak: Mapping[str, int] | None
    listener: Listener | None
    progress: Callable[[int], None] | None
    tier: SimulatedTier | str | None


def simulate(program: Program, budget: Amount | Mapping[str, Amount], **options: Unpack[Options]) -> Run:
    """Replay a program under a budget: what would that have cost?

    Parameters
    ----------
    budget
        Bytes for each device ("512MB"), a share (0.4, "40%") of the peak of each without a budget, or a mapping from
        device to one of these.
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
    (run,) = _replays(program, budget, None, None, **options)
    return run


def iterate(
    program: Program,
    budget: Amount | Mapping[str, Amount],
    iterations: int,
    *,
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
    return _replays(program, budget, iterations, effort if foresight else None, **options)


def _replays(
    program: Program,
    budget: Amount | Mapping[str, Amount],
    iterations: int | None,
    effort: float | None,
    *,
    policy: str | Policy = DEFAULT,
    search: str | Search = "exact",
    release: ReleaseMode = "eager",
    limit: float = 2.0,
    machine: MachineName | None = None,
    peak: Mapping[str, int] | None = None,
    listener: Listener | None = None,
    progress: Callable[[int], None] | None = None,
    tier: SimulatedTier | str | None = None,
) -> Iterator[Run]:
    """The runs, as they become ready; what is wrong with the options is said at once. `iterations`: None for one."""
    if not limit >= 1:
        raise ValueError(f"limit is an overhead, at least 1, not {limit!r}")
    peak = baseline(program) if peak is None else peak
    budgets, ratio = budgets_of(budget, peak)
    policy_object = policy_of(policy)  # type: ignore[arg-type]  # any name, which is checked there
    most = limit if iterations is None else max(limit, _PATIENT)
    if machine is None:
        theirs = program.published and policy_object.published and knows(policy_object) and tier is None
        machine = "published" if theirs else "library"
    replay: Replay | PublishedReplay
    if machine == "library":
        moving = SimulatedTier.read(tier) if isinstance(tier, str) else tier
        replay = Replay(
            program,
            budgets,
            policy=policy_object,
            search=search,
            release=release,
            limit=most,
            effort=effort,
            tier=moving,
        )
    elif tier is None:
        replay = PublishedReplay(program, budgets, policy=policy_object, search=search, release=release, limit=most)
    else:
        raise ValueError("the published machine has no tiers; leave either out: the machine, or the tier")
    name = policy if isinstance(policy, str) else policy_object.name
    if tier is not None:
        name += f", tier {tier}"

    def runs() -> Iterator[Run]:
        for iteration in range(1, 1 + (iterations or 1)):
            before = replay.counts()
            status, seconds = _timed(replay, iterations is not None, listener, progress)
            after = replay.counts()
            ended = status == "ok"
            waited = after.waited - before.waited
            total = (after.model_time - before.model_time) + (after.remat_time - before.remat_time) + waited
            if ended and total > limit * program.model_time:
                status = "thrash"
            yield Run(
                trace=program.name,
                policy=name,
                search=replay.search,
                release=release,
                budget_bytes=sum(budgets.values()),
                budget_ratio=ratio,
                status=status,
                overhead=_overhead(total, program.model_time) if status == "ok" else None,
                model_time=program.model_time * program.unit,
                total_time=total * program.unit,
                peak_bytes=after.peak,
                baseline_peak_bytes=sum(peak.values()),
                evictions=after.evictions - before.evictions,
                rematerializations=after.rematerializations - before.rematerializations,
                candidates_scored=after.scored - before.scored,
                seconds=seconds,
                iteration=iteration,
                moved_bytes=after.written - before.written,
                fetched_bytes=after.read - before.read,
                waited_time=waited * program.unit,
            )
            if not ended:
                return

    return runs()


def _timed(
    replay: Replay | PublishedReplay,
    again: bool,
    listener: Listener | None,
    progress: Callable[[int], None] | None,
) -> tuple[Status, float]:
    """Replay the program, as the next round if it is done `again`; how that ended, and the seconds that it took."""
    stop = None if listener is None else replay.subscribe(listener)
    collecting = gc.isenabled()
    gc.disable()  # the graph lives to the end of the replay
    start = perf_counter()
    try:
        status = replay.again(progress) if again else replay.run(progress)
    finally:
        seconds = perf_counter() - start
        if collecting:
            gc.enable()
        if stop is not None:  # what goes with the replay afterwards is no step of it
            stop()
    return status, seconds


def _overhead(total: float, model: float) -> float:
    return total / model if model else 1.0


def budgets_of(budget: Amount | Mapping[str, Amount], peak: Mapping[str, int]) -> tuple[dict[str, int], float]:
    """Bytes by device, and which share of the whole peak they are."""
    number = budget if isinstance(budget, Mapping) else bytes_or_share(budget)
    wanted = number if isinstance(number, Mapping) else dict.fromkeys(peak, number)
    budgets = {
        device: parse_budget(amount, whole=peak.get(device), of=f"the peak of {device}")
        for device, amount in wanted.items()
    }
    return budgets, number if isinstance(number, float) else sum(budgets.values()) / max(1, sum(peak.values()))
