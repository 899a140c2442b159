from recompute._engine.frames cimport Frame


cdef class Scheduler:
    cdef object _changes
    cdef public object changed
    cdef public dict in_flight
    cdef public dict stacks
    cdef public Frame leader
    cdef public dict blocked
    cdef public long long executing

    cpdef notify(self)
    cpdef over(self, Frame bottom)
