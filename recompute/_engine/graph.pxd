cimport cython

from recompute._engine.pool cimport Pool
from recompute._policy.candidate cimport Candidate


cdef class Operation:
    cdef public object function
    cdef public tuple positional
    cdef public tuple arguments
    cdef public object options
    cdef public object outputs
    cdef public long long number
    cdef public double c0
    cdef public long long runs
    cdef public object code
    cdef public int instruction


cdef class Value:
    cdef public object payload
    cdef public Operation operation
    cdef public Storage storage
    cdef public long long number
    cdef public object references
    cdef public object users
    cdef public bint pinned
    cdef public bint outlined
    cdef public object remains

    cpdef bint forget_reference(self, object reference) except -1
    cpdef refer(self, object reference)
    cpdef add_user(self, Operation operation)
    cpdef remove_user(self, Operation operation)


cdef class Storage(Candidate):
    cdef public Pool pool
    cdef public object buffer
    cdef public int state
    cdef public bint resident
    cdef public bint dropped
    cdef public long long seen
    cdef public object values
    cdef public object nearby
    cdef public object held

    @cython.locals(value=Value)
    cpdef bint needed_outside(self) except -1
    @cython.locals(value=Value)
    cpdef bint is_vacant(self) except -1
    @cython.locals(value=Value, operation=Operation, argument=Value, home=Storage, found=dict)
    cpdef tuple neighbours_up(self)


cdef class Held:
    cdef public bint alone
    cdef public object buffer
    cdef public long long number
    cdef public dict payloads
    cdef public Pool pool
    cdef public object reference
    cdef public object settles
    cdef public long long size
    cdef public Storage storage


@cython.locals(value=Value)
cpdef copy_of(Storage storage)
