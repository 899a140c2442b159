cimport cython

cdef double _EARLY


@cython.final
cdef class Tournament:
    cdef double[::1] _base
    cdef double[::1] _slope
    cdef double[::1] _origin
    cdef long long[::1] _winner
    cdef double[::1] _expiry
    cdef readonly Py_ssize_t capacity

    cpdef (double, double, double) line(self, Py_ssize_t slot) except *
    cdef Py_ssize_t _leaf(self, Py_ssize_t slot) except -1
    @cython.locals(leaf=Py_ssize_t)
    cpdef enter(self, Py_ssize_t slot, double base, double slope, double origin)
    @cython.locals(node=Py_ssize_t, first=Py_ssize_t, last=Py_ssize_t)
    cpdef build(self, Py_ssize_t slots, double now)
    cpdef set(self, Py_ssize_t slot, double base, double slope, double origin, double now)
    cpdef clear(self, Py_ssize_t slot, double now)
    @cython.locals(late=list, node=Py_ssize_t, child=Py_ssize_t)
    cpdef Py_ssize_t highest(self, double now) except -2
    @cython.locals(node=Py_ssize_t)
    cdef _climb(self, Py_ssize_t slot, double now)
    @cython.locals(
        child=Py_ssize_t, high=Py_ssize_t, low=Py_ssize_t, known=Py_ssize_t,
        until=double, fast=double, slow=double, gap=double, crossing=double, other=double,
    )
    cdef bint _play(self, Py_ssize_t node, double now, Py_ssize_t changed=*) except -1
