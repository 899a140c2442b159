"""The story of a value: through which states its storage went, when, and why. Kept only on request.

What a victim was chosen by is noted when it is chosen; a score is computed from that when the story is told, without
the lock, and only for policies of this library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from recompute._budget import format_bytes
from recompute._engine.functions import place_of
from recompute._engine.graph import Storage
from recompute._engine.meter import Meter
from recompute._engine.states import COMING, IN_MEMORY, NAMES
from recompute._policy.formulas import Policy
from recompute.text import name_at_rest, seconds

if TYPE_CHECKING:
    from recompute._engine.graph import Operation
    from recompute._policy.search import Candidates

_TENTATIVE: Final = "not necessary"
"""Why a victim comes back that was chosen together with others, and turned out not to be needed: it has never left."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a victim was chosen by. Seconds and bytes."""

    cost: float
    """Of making it again, by itself."""
    neighbours: float | None
    """Of what is evicted around it, as the policy counts it; None: it is not needed."""
    size: int
    staleness: float
    pressure: float
    policy: Policy

    @property
    def score(self) -> float | None:
        """The least of all candidates; None if it is not needed, or if the policy is not one of this library."""
        if self.neighbours is None or self.policy.foreign:
            return None
        return self.policy.under(self.pressure).score(self.cost, self.neighbours, self.size, self.staleness)


@dataclass(frozen=True, slots=True)
class Step:
    """A storage came to a state."""

    time: float
    """On the compute clock (seconds)."""
    state: str
    """See the page on states in the docs."""
    why: str
    number: int = 0
    """Of the storage."""
    function: str = ""
    """What makes it; empty for a source."""
    place: str = ""
    """Where that was called: `file:line`."""
    nbytes: int = 0
    seconds: float = 0.0
    """That were spent to make it again."""
    wanted: str = ""
    """What it was evicted for."""
    wanted_bytes: int = 0
    choice: Choice | None = None
    """What it was chosen by, if it was evicted to make room."""

    def __str__(self) -> str:
        return f"{self.time:.6g} s  {self.state}: {self.words}"

    @property
    def words(self) -> str:
        """Why, with figures."""
        if self.why == "made":
            by = f" by {self.function}" if self.function else ""
            return f"made{by}, {format_bytes(self.nbytes)}{f', {self.place}' if self.place else ''}"
        if self.choice is None:
            return f"{self.why}, in {seconds(self.seconds)}" if self.seconds else self.why
        choice, score = self.choice, self.choice.score
        text = f"to make room for {self.wanted}" if self.wanted else self.why
        if self.wanted_bytes:
            text += f", {format_bytes(self.wanted_bytes)}"
        if choice.neighbours is None:
            text += "; it was not needed any more"
        elif score is not None:
            text += f"; its score was the least, {score:.3g}"
        text += f": it costs {seconds(choice.cost)}"
        if choice.neighbours:
            text += f", and {seconds(choice.neighbours)} with what is evicted around it"
        return f"{text}, has {format_bytes(choice.size)}, and was not used for {seconds(choice.staleness)}"


class Steps(list[Step]):
    """Prints as one line a step."""

    now: str = ""
    """The state at the time that it was told."""

    def __str__(self) -> str:
        return "\n".join([*map(str, self), *([f"now  {self.now}"] if self.now else [])])


class Story:
    """The newest transitions of all storages. It is what the machine tells of each: under the lock."""

    def __init__(self, meter: Meter, most: int) -> None:
        self._meter = meter
        self._moves: deque[Step] = deque(maxlen=most)
        self._repeated = 0.0  # seconds of recomputation that are in a step
        self._choices: dict[int, Choice] = {}
        self._wanted = ("", 0)

    def __call__(self, storage: Storage, before: int, after: int, why: str) -> None:
        if after == COMING:
            return
        if why == _TENTATIVE:
            self._take_back(storage.number)
            return
        repeated, wanted, choice = 0.0, ("", 0), None
        if IN_MEMORY[after]:
            repeated, self._repeated = self._meter.remat_time - self._repeated, self._meter.remat_time
        elif why == "pressure":
            wanted, choice = self._wanted, self._choices.get(storage.number)
        operation = next((value.operation for value in storage.values), None)
        name, place = "", ""
        if operation is not None:
            name, place = name_at_rest(operation.function), place_of(operation.code, operation.instruction)
        self._moves.append(
            Step(
                self._meter.now,
                NAMES[after],
                why,
                storage.number,
                name,
                place,
                storage.size,
                repeated,
                *wanted,
                choice,
            )
        )

    def _take_back(self, number: int) -> None:
        """The newest step of a storage did not happen."""
        for at in range(len(self._moves) - 1, -1, -1):
            if self._moves[at].number == number:
                del self._moves[at]
                return

    def wants(self, what: Operation | None, size: int) -> None:
        """What room is made for next."""
        self._wanted = ("a source" if what is None else name_at_rest(what.function), size)
        self._choices.clear()

    def chosen(self, victims: Iterable[Any], candidates: Candidates, now: float) -> None:
        """The candidates of least score, whose costs were computed just now."""
        around = candidates.around
        for victim in victims:
            needed = not around.unneeded(victim)
            self._choices[victim.number] = Choice(
                victim.cost,
                around.cost(victim) if needed else None,
                victim.size,
                now - victim.last_access,
                candidates.pressure,
                candidates.policy,
            )

    def of(self, number: int) -> Steps:
        """The transitions of one storage, the oldest first. O(transitions kept)."""
        return Steps(step for step in list(self._moves) if step.number == number)

    def all(self) -> Steps:
        """Those of all storages."""
        return Steps(list(self._moves))
