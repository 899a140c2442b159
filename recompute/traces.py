"""Recorded programs: read one (`read`), look at what it did (`Program`, `Call`), replay it in the simulator.

`recorded_events` gives what the cache told while it was recorded: its decisions, too.
"""

from recompute._traces.program import Call, Program, TraceError
from recompute._traces.read import read, recorded_events

__all__ = ["Call", "Program", "TraceError", "read", "recorded_events"]
