cimport cython

from recompute._engine.changes cimport Changes
from recompute._engine.finalizer cimport Departure, Finalizer
from recompute._engine.graph cimport Held, Storage, Value
from recompute._engine.journal cimport Journal
from recompute._engine.memory cimport Memory
from recompute._engine.meter cimport Meter
from recompute._engine.pool cimport Pool
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
    cdef bint _seen_to(self, bint blocking) except -1
    cdef _process(self, object reference)
    @cython.locals(departure=Departure)
    cpdef settle_departures(self, bint others=*)
    cdef _give_up(self, Departure departure)
    cpdef bint takes_over(self, Departure departure) except -1
    cdef _depart(self, Departure departure)
    cpdef gone(self, Held held)
    @cython.locals(pool=Pool, storage=Storage, scheduler=Scheduler, held=Held, finalizer=Finalizer)
    cdef _departed(self, Departure departure)
    @cython.locals(departure=Departure)
    cpdef bint mine_depart(self, Pool pool) except -1
    cpdef going(self, object handle, Value value)
    cpdef drain(self)


@cython.locals(storage=Storage)
cdef bint _can_wait(Value value) except -1
cdef bint _is_at_it(Departure departure) except -1
