"""For tests of programs that use the cache, of adapters, and of the cache itself.

Identity            the same surface, nothing evicted: what a program must give
ManualClock         time that moves when told to
EventLog            what a cache did
check_invariants    whether a cache's books are right
check_adapter       whether an adapter keeps its promises
check_arrays        whether an adapter of arrays keeps its further promises, for each dtype and layout
"""

from recompute.testing._clock import ManualClock
from recompute.testing._identity import Identity
from recompute.testing._invariants import check_invariants
from recompute.testing._log import EventLog
from recompute.testing.arrays import check_arrays
from recompute.testing.conformance import check_adapter

__all__ = ["EventLog", "Identity", "ManualClock", "check_adapter", "check_arrays", "check_invariants"]
