cimport cython

from recompute._engine.changes cimport Changes
from recompute._engine.finalizer cimport Finalizer
from recompute._engine.graph cimport Storage, Value
from recompute._engine.journal cimport Journal
from recompute._engine.memory cimport Memory
from recompute._engine.meter cimport Meter
from recompute._engine.references cimport References
from recompute._engine.scheduler cimport Scheduler


cdef class Settling:
    cdef Changes _changes
    cdef object _moving
    cdef Finalizer _finalizer
    cdef References _references
    cdef Memory _memory
    cdef Scheduler _scheduler
    cdef Meter _meter
    cdef Journal _journal
    cdef list _unwanted

    cpdef settle(self, bint blocking=*)
    cpdef going(self, object handle, Value value)
    cpdef drain(self)


@cython.locals(storage=Storage)
cdef bint _can_wait(Value value) except -1
