"""A clock that stands still until it is told to move on."""

from __future__ import annotations


class ManualClock:
    """Seconds, for `Cache(clock=...)`: functions under test advance it by what they are to cost."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass. Clocks do not run backwards: ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"a clock does not run backwards: {seconds!r}")
        self.time += seconds

    def __repr__(self) -> str:
        return f"ManualClock({self.time})"
