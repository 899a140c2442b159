"""What is told of a plan: the least budget that works, what is in memory at the worst moment, what runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from recompute import planners
from recompute.text import format_bytes
from recompute_torch._compile.program import Joint

_PROBES: Final = 8  # budgets that are tried to say which works
_NAMED: Final = 4  # of what is in memory at the worst moment


@dataclass(frozen=True)
class Floor:
    """Where a step needs most, if each result and each gradient is made once, and nothing else is kept."""

    call: int
    """The operator."""
    own: int
    """Bytes of what it takes and makes."""
    there: int
    """Bytes of other results and gradients that are there by then."""

    @property
    def nbytes(self) -> int:
        """No plan does with less."""
        return self.own + self.there


def floor(joint: Joint) -> Floor:
    """The worst moment that no plan can avoid. O(program)."""
    program = joint.program
    lasting = {program.storages[value] for value in program.outputs}
    there: set[int] = set()
    held = 0
    worst = Floor(0, 0, 0)
    for number, call in enumerate(program.calls):
        own = {program.storages[value] for value in (*call.arguments, *call.results)}
        taken = sum([program.sizes[storage] for storage in own])
        beside = held - sum([program.sizes[storage] for storage in own & there])
        worst = max(worst, Floor(number, taken, beside), key=lambda moment: moment.nbytes)
        for storage in {program.storages[value] for value in call.results} & lasting - there:
            there.add(storage)
            held += program.sizes[storage]
    return worst


def least(joint: Joint, budget: int, fits: Callable[[int], bool]) -> int:
    """About the smallest budget that a plan is found for, where for `budget` there was none. O(some plans).

    Whatever that was, the same budgets are tried, so that the answer is the same.
    """
    low, high = floor(joint).nbytes - 1, planners.peak(joint.program)
    return planners.smallest(lambda given: given > budget and fits(given), low, high, tries=_PROBES)


def holders(joint: Joint) -> str:
    """The operator that sets the floor, what it holds, and the results and gradients that are there by then."""
    program, worst = joint.program, floor(joint)
    call = program.calls[worst.call]
    own = dict.fromkeys(program.storages[value] for value in (*call.arguments, *call.results))
    largest = sorted(own, key=lambda storage: -program.sizes[storage])[:_NAMED]
    held = ", ".join(
        f"{joint.name(storage)} {format_bytes(program.sizes[storage])}" for storage in largest if program.sizes[storage]
    )
    lasting = sum(program.sizes[storage] for storage in {program.storages[value] for value in program.outputs})
    beside = f" beside {format_bytes(worst.there)} of results and gradients" if worst.there else ""
    return (
        f"nothing below {format_bytes(worst.nbytes)} can work: {call.name} holds {format_bytes(worst.own)} while it "
        f"runs ({held}){beside}; all results and gradients, which stay, are {format_bytes(lasting)}"
    )


def repeated(joint: Joint, order: Sequence[int]) -> Counter[str]:
    """Which operators run again, and how often."""
    found = Counter([joint.program.calls[number].name for number in order])
    found.subtract(call.name for call in joint.program.calls)
    return +found
