"""What a storage is, in one word, and what can come next. Never compiled."""

from __future__ import annotations

from typing import Final

COMING: Final = 0
RESIDENT: Final = 1
SOURCE: Final = 2
MOVABLE: Final = 3
LEAVING: Final = 4
MOVING: Final = 5
HELD: Final = 6
MOVED: Final = 7
DROPPED: Final = 8
FORGOTTEN: Final = 9

NAMES: Final = (
    "coming",
    "resident",
    "source",
    "movable",
    "leaving",
    "moving",
    "held",
    "moved",
    "dropped",
    "forgotten",
)

MEANINGS: Final = (
    "is about to be there, for the first time or again; its bytes may be reserved",
    "in memory, and can be made again",
    "in memory with a value on it that nothing can make again and no tier has",
    "the same, and a tier may have it",
    "evicted, and its payloads are about to be destroyed: their bytes count as departing",
    "evicted, and a copy is being written to a tier: the bytes count as departing",
    "evicted, and the program still holds it: the bytes count as held",
    "evicted, with a copy in a tier",
    "evicted, and only its recipe brings it back",
    "nothing can need it again",
)

_IN_MEMORY: Final = (RESIDENT, SOURCE, MOVABLE)

NEXT: Final = (
    frozenset((*_IN_MEMORY, DROPPED, FORGOTTEN)),
    frozenset((SOURCE, MOVABLE, LEAVING, MOVING, MOVED, DROPPED, FORGOTTEN)),
    frozenset((RESIDENT, MOVABLE, FORGOTTEN)),
    frozenset((RESIDENT, SOURCE, LEAVING, MOVING, MOVED, DROPPED, FORGOTTEN)),
    frozenset((COMING, *_IN_MEMORY, HELD, DROPPED, FORGOTTEN)),
    frozenset((COMING, *_IN_MEMORY, MOVED, DROPPED, FORGOTTEN)),
    frozenset((COMING, *_IN_MEMORY, DROPPED, FORGOTTEN)),
    frozenset((COMING, *_IN_MEMORY, DROPPED, FORGOTTEN)),
    frozenset((COMING, *_IN_MEMORY, HELD, FORGOTTEN)),
    frozenset[int](),
)
"""State -> those that can come next."""

IN_MEMORY: Final = tuple(state in _IN_MEMORY for state in range(len(NAMES)))
"""State -> whether its bytes are counted as those of a storage in memory: a candidate unless locked."""

EVICTED: Final = tuple(state in (LEAVING, MOVING, HELD, MOVED, DROPPED) for state in range(len(NAMES)))
"""State -> whether it was in memory, and something brings it back."""

LOST: Final = tuple(state in (LEAVING, HELD, DROPPED) for state in range(len(NAMES)))
"""State -> whether only its recipe brings it back: it counts for what is made from it, and for what it is made from."""


def table() -> str:
    """The states as a table in Markdown, for the docs."""
    lines = ["| state | what it is | what can come next |", "|---|---|---|"]
    for name, meaning, following in zip(NAMES, MEANINGS, NEXT, strict=True):
        lines.append(f"| {name} | {meaning} | {', '.join(NAMES[state] for state in sorted(following)) or 'nothing'} |")
    return "\n".join(lines) + "\n"
