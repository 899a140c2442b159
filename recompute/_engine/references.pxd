cimport cython

from recompute._engine.finalizer cimport Finalizer
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.journal cimport Journal
from recompute._engine.memory cimport Memory
from recompute._engine.meter cimport Meter
from recompute._engine.results cimport Results
from recompute._engine.scheduler cimport Scheduler


cdef class References


cdef class Eager:
    cdef readonly str name
    cdef readonly bint lingers
    cdef readonly set waiting

    cpdef released(self, References references, Storage storage)
    cpdef unlocked(self, References references, Storage storage)
    cpdef shrunk(self, References references, Storage storage)
    @cython.locals(value=Value)
    cpdef performed_again(self, References references, object values)


cdef class Ignore(Eager):
    pass


cdef class Banish(Eager):
    @cython.locals(value=Value, users=dict, outputs=list, in_flight=dict)
    cdef bint _banish(self, References references, Storage storage) except -1


cdef class References:
    cdef readonly Eager mode
    cdef object _evict
    cdef Memory _memory
    cdef Meter _meter
    cdef Journal _journal
    cdef Finalizer _finalizer
    cdef readonly Scheduler scheduler
    cdef Results _results
    cdef object _fingerprints
    cdef public long long history
    cdef public object history_limit
    cdef public object released_sources
    cdef public set waiting
    cdef set _on_advice

    @cython.locals(value=Value)
    cpdef dropped(self, object reference)
    @cython.locals(storage=Storage)
    cpdef released(self, Value value)
    cpdef evict_unreferenced(self, Storage storage)
    cpdef forget_if_unused(self, Storage storage)
    @cython.locals(value=Value, storage=Storage)
    cpdef unlocked(self, object values)
    @cython.locals(value=Value, left="long long")
    cpdef bint in_flight(self, Storage storage) except -1
    @cython.locals(storage=Storage)
    cdef bint _stays(self, Value value) except -1
    @cython.locals(operation=Operation, storage=Storage, memory=Memory, finalizer=Finalizer, value=Value)
    cpdef forget(self, list dead)
    cpdef lose_copy(self, Value value)
    cdef list _unlink(self, Value value, Operation operation)
    cpdef list forget_operation(self, Operation operation)
    @cython.locals(argument=Value)
    cpdef list unlink(self, Operation operation, object arguments)
