"""What is told of a plan: the least budget that works, what is in memory at the worst moment, what runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from recompute import planners
from recompute.extend import format_bytes
from recompute_torch._compile.program import Joint

_PROBES: Final = 6  # budgets that are tried to say which works
_NAMED: Final = 4  # of what is in memory at the worst moment


def least(joint: Joint, budget: int, fits: Callable[[int], bool]) -> int:
    """About the smallest budget that a plan is found for, where for `budget` there was none. O(some plans).

    Whatever that was, the same budgets are tried, so that the answer is the same.
    """
    low, high = planners.least(joint.program), planners.peak(joint.program)
    return planners.smallest(lambda given: given > budget and fits(given), low, high, tries=_PROBES)


def holders(joint: Joint) -> str:
    """What is in memory while the operator runs that needs most: itself, and the largest of what it holds."""
    program = joint.program

    def taken(number: int) -> dict[int, int]:
        call = program.calls[number]
        storages = {program.storages[value] for value in (*call.arguments, *call.results)}
        return {storage: program.sizes[storage] for storage in storages if program.sizes[storage]}

    worst = max(range(len(program.calls)), key=lambda number: sum(taken(number).values()))
    largest = sorted(taken(worst).items(), key=lambda each: -each[1])[:_NAMED]
    held = ", ".join(f"{joint.name(storage)} {format_bytes(size)}" for storage, size in largest)
    lasting = sum(program.sizes[storage] for storage in {program.storages[value] for value in program.outputs})
    return (
        f"{program.calls[worst].name} holds {format_bytes(sum(taken(worst).values()))} while it runs ({held}); results "
        f"and gradients, which stay, are {format_bytes(lasting)}"
    )


def repeated(joint: Joint, order: Sequence[int]) -> Counter[str]:
    """Which operators run again, and how often."""
    found = Counter([joint.program.calls[number].name for number in order])
    found.subtract(call.name for call in joint.program.calls)
    return +found
