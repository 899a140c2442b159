"""Recorded programs: read one (`read`), look at what it did (`Program`, `Call`), replay it in the simulator."""

from recompute._traces.program import Call, Program, TraceError
from recompute._traces.read import read

__all__ = ["Call", "Program", "TraceError", "read"]
