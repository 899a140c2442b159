"""What is known of a program: the best script of a round so far, and the planning of better ones, in a thread.

First comes a quick script, then better ones. The thread reads what was recorded and nothing else, so it holds no lock
of the cache.
"""

from __future__ import annotations

import os
import sys
from _thread import start_new_thread
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, get_native_id
from time import perf_counter, sleep, thread_time
from typing import Final

from recompute._foresight.recording import Round
from recompute._foresight.script import Script, script_of
from recompute._plans.own import Effort, own
from recompute._plans.problem import numbered, problem_of, woven
from recompute._plans.schedule import PlanError

QUICK: Final = 0.02
"""Of the effort of a plan, for the first script."""

_BUSY: Final = 3e-4
"""Seconds of planning in the background after which it pauses."""

_PAUSE: Final = 5e-5
"""Seconds of such a pause, at least."""

_LONG: Final = 2.5e-3
"""Seconds of an operation beside which planning takes all the time that it can have."""

_LEAST: Final = 0.2
"""Of the time, that planning takes beside operations so short that all that they wait for is the interpreter's lock."""


_FREE: Final = 0.1
"""Seconds that a thread may plan in any case. Beside operations that feel it, it plans no longer than the program has
repeated since then: a plan saves no more than that, and may come to nothing."""

_LOOK: Final = 0.01
"""Seconds until a thread that has planned so long looks again."""

_NICER: Final = 15
"""Than the program: some 4 % of a core that it wants all of. With 19 planning would hardly move on a full machine."""


class Planning:
    """Plans one round. `script` is the best so far; None: there is none yet, or none at all.

    `known`: an order of runs to start from; by default that of the cache in the recorded round.
    """

    def __init__(self, recorded: Round, budget: int, effort: float, known: Sequence[int] | None = None) -> None:
        self.script: Script | None = None
        self.failed = ""
        """Why there is no script, and will be none."""
        self.error: Exception | None = None
        """The unexpected error that has ended it."""
        self.recorded = recorded
        self.budget = budget
        self.since = 0.0
        """Seconds that the program had repeated when it began."""
        self.allowed = _FREE
        """Seconds that the thread may take by now."""
        self._known = known
        self._efforts = [min(QUICK, effort), effort] if effort > QUICK else [effort]
        self.over = Event()
        """Set when the thread ends."""
        self._process: int | None = None  # in which it runs in the background
        self._stopped = False
        self._pause = 0.0  # seconds, now and then; 0 if it runs here and now
        self._rested = perf_counter()

    def start(self) -> None:
        """In the background. Not by `Thread.start`, which waits: Ctrl-C there can come out as a RuntimeError."""
        self._pause = _pause_beside(self.recorded)
        start_new_thread(self._run_quietly, ())
        self._process = os.getpid()

    def stop(self) -> None:
        """Stop: a better script is not needed any more."""
        self._stopped = True

    def wait(self) -> None:
        """Until nothing better will come."""
        if not self.is_over:
            self.over.wait()

    def run(self) -> None:
        """Here and now."""
        problem = problem_of(self.recorded.program, self.budget)
        if self._pause:
            problem.rest = self._rest
        known = self._known or woven(problem, numbered(problem, self.recorded.order))
        try:
            if self.budget < problem.least:
                raise PlanError(f"a plan needs {problem.least:,} bytes")
            for effort in self._efforts:
                sequence, _ = own(problem, Effort(effort), online=lambda _: known)
                script = script_of(self.recorded, problem, sequence)
                if self.script is None or script.cost < self.script.cost:
                    self.script = script
        except PlanError as error:
            self.failed = str(error)

    def _run_quietly(self) -> None:
        """An error is for the program's own thread, which goes on without a plan."""
        step_back()
        try:
            self.run()
        except _Stopped:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.over.set()

    @property
    def is_over(self) -> bool:
        """Whether nothing better will come. After a fork the thread is not there."""
        return self._process != os.getpid() or self.over.is_set()

    def _rest(self) -> None:
        """Release the interpreter's lock: other threads would else get it after five milliseconds only."""
        if perf_counter() - self._rested > _BUSY:
            sleep(self._pause)
            while self._pause > _PAUSE and thread_time() > self.allowed and not self._stopped:
                sleep(_LOOK)
            self._rested = perf_counter()
        if self._stopped:
            raise _Stopped


def step_back() -> None:
    """Let this thread have what time others leave, where a thread has a priority of its own: on Linux.

    Operators that run on all cores would else wait for the one of their threads that shares its core with planning.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, get_native_id(), min(19, own + _NICER))


def _pause_beside(recorded: Round) -> float:
    """Seconds of a pause: each operation may wait for the interpreter's lock, which a long one does not feel."""
    calls = recorded.program.calls
    mean = recorded.model_cost / len(calls) if calls else 0.0
    share = min(1.0, max(_LEAST, mean / _LONG))
    return max(_PAUSE, _BUSY * (1 / share - 1))


class _Stopped(Exception):
    """The script is not wanted any more."""


_MEASURED: Final = 3
"""Rounds whose costs are averaged before they are compared with those of the recorded round."""

_OTHER: Final = 0.05
"""Of the cost of the round: what the costs of its operations may differ by, together."""


class Knowledge:
    """Of one program. `effort` and `waits`: see `Settings`."""

    _planning: Planning | None = None  # here, since an interrupt may cut short what follows, and __del__ needs it

    def __init__(self, effort: float, *, waits: bool) -> None:
        self.script: Script | None = None
        """The best one so far."""
        self.changed = False
        """Whether the last round was not as the script has it."""
        self._effort = effort
        self._waits = waits
        self._threads: list[Planning] = []  # what may still run in the background, stopped or not
        self._planned: Planning | None = None  # what the script is from
        self._costs: list[list[float | None]] = []  # of the calls, in rounds that were as the script has them
        self._repeated = 0.0  # seconds that the program had repeated by the last look

    @property
    def wanted(self) -> bool:
        """Whether a round should be recorded: nothing is known of it, or something else."""
        return self.changed if self.script is not None else self._planning is None

    @property
    def final(self) -> bool:
        """Whether no better script will come."""
        return self._planning is None

    def __del__(self) -> None:
        self.stop()

    def plan(self, recorded: Round, budget: int) -> None:
        """Make a script of a round for a budget in bytes."""
        self._start(Planning(recorded, budget, self._effort))

    def look(self, repeated: float) -> str:
        """Take the best script that there is by now. If no script comes at all: why; else empty.

        `repeated`: seconds that the program has repeated so far. Raises what planning has raised.
        """
        self._repeated, planning = repeated, self._planning
        if planning is None:
            return ""
        planning.allowed = _FREE + repeated - planning.since
        if planning.script is not None and planning.script is not self.script:
            self.script, self._planned, self.changed = planning.script, planning, False
            self._costs = []
        if not planning.is_over:
            return ""
        self._planning = None
        if planning.error is not None:
            raise planning.error
        return "" if self.script is not None else planning.failed or "no plan was made"

    def compare(self, costs: list[float | None]) -> None:
        """Plan again if operations do not cost what they did in the recorded round, which was one measurement each."""
        planned, script = self._planned, self.script
        if self.changed or planned is None or script is None or self._planning is not None:
            return
        if len(self._costs) == _MEASURED:
            return  # they were compared
        self._costs.append(costs)
        if len(self._costs) == _MEASURED:
            before = [call.cost for call in planned.recorded.program.calls]
            now = [_mean(cost, measured) for cost, *measured in zip(before, *self._costs, strict=True)]
            if sum([abs(one - other) for one, other in zip(before, now, strict=True)]) > _OTHER * sum(before):
                recorded = planned.recorded.with_costs(now)
                self._start(Planning(recorded, planned.budget, self._effort, script.sequence))

    def forget(self) -> None:
        """It is another program now."""
        self.stop()
        self.script = self._planned = None

    def stop(self) -> None:
        """Plan no more."""
        if self._planning is not None:
            self._planning.stop()
            self._planning = None

    def finish(self) -> None:
        """Plan no more; when it returns, no thread does."""
        self.stop()
        for planning in self._threads:
            planning.wait()
        self._threads.clear()

    def _start(self, planning: Planning) -> None:
        self.stop()
        self._planning, planning.since = planning, self._repeated
        if self._waits:
            planning.run()
        else:
            self._threads = [*(other for other in self._threads if not other.is_over), planning]
            planning.start()


def _mean(before: float, measured: Sequence[float | None]) -> float:
    costs = [cost for cost in measured if cost is not None]
    return sum(costs) / len(costs) if costs else before
