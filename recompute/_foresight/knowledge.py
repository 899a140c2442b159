"""What is known of a program: the best script of a round so far, and the planning of a better one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from recompute._foresight.planning import Planning
from recompute._foresight.recording import Round
from recompute._foresight.script import Script

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

    def look(self) -> str:
        """Take the best script that there is by now. If no script comes at all: why; else empty.

        Raises what planning has raised.
        """
        planning = self._planning
        if planning is None:
            return ""
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
        self._planning = planning
        if self._waits:
            planning.run()
        else:
            self._threads = [*(other for other in self._threads if not other.is_over), planning]
            planning.start()


def _mean(before: float, measured: Sequence[float | None]) -> float:
    costs = [cost for cost in measured if cost is not None]
    return sum(costs) / len(costs) if costs else before
