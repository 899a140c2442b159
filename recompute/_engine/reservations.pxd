cimport cython

from recompute._engine.frames cimport Frame
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.memory cimport Memory
from recompute._engine.pool cimport Pool


cdef class Reservations:
    cdef Memory _memory
    cdef bint _always
    cdef public bint only_declared

    @cython.locals(output=Value, storage=Storage, pool=Pool, size="long long")
    cpdef bint reserve(self, Frame frame, Operation operation) except -1
    @cython.locals(operation=Operation, memory=Memory, pool=Pool, size="long long", extra="long long", room="long long", shares=Storage, own=bint)
    cpdef dict shortage(self, Frame frame, list made)
