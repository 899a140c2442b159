cimport cython


cdef extern from "Python.h":
    int disable "PyGC_Disable" ()
    int enable "PyGC_Enable" ()
    bint isenabled "PyGC_IsEnabled" ()


cdef class Call:
    cdef object __weakref__


cdef class Shared:
    cdef public object lock
    cdef public object is_mine
    cdef public object waiting
    cdef public object if_free
    cdef public int threshold
    cdef public Changes changing
    cdef public bint off
    cdef public bint raised

    cpdef look(self)
    cpdef pause(self)
    cpdef resume(self)
    cpdef calls_python(self)


@cython.locals(changing=Changes)
cdef _end(Shared here, bint whole)


cdef class Changes:
    cdef object __weakref__
    cdef public bint unfinished
    cdef public bint atomic
    cdef object _make_good
    cdef Shared _shared

    cpdef bint is_mine(self) except -1
    cpdef object alone(self)
    cpdef object begun(self, bint python=*)
    cpdef calls_python(self)
