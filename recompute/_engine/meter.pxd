cimport cython


cdef class Meter:
    cdef public object clock
    cdef public double now
    cdef public double remat_time
    cdef public double moving_time
    cdef public double library_time
    cdef public long long turns
    cdef public long long measured
    cdef public long long next
    cdef public dict repeated
    cdef public dict timers
    cdef public object unknown

    cpdef double read(self) except? -1.0
    cpdef double turn_begins(self) except? -1.0
    @cython.locals(time=double)
    cpdef turn_ends(self, double began, double spent)
    cdef double _reading(self) except? -1.0
    cpdef bill(self, double cost, bint again)
    @cython.locals(count=list)
    cpdef count_repeated(self, object function, double cost)
