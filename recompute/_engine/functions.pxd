cimport cython


cdef extern from *:
    """
    #define refers_to(reference, object) (PyWeakref_GET_OBJECT(reference) == (object))
    """
    bint refers_to(object, object)


cdef extern from "Python.h":
    object id "PyLong_FromVoidPtr" (object)  # not looked up among the built-in names


cdef dict _facts
cdef Facts _newest
cdef dict _codes


cdef class Code:
    cdef public object code
    cdef public object names
    cdef public object silent
    cdef public tuple meanings


cdef class Facts:
    cdef public object reference
    cdef public Code code
    cdef public bint closed
    cdef public bint bare
    cdef public object copy


@cython.locals(known=Facts)
cpdef Facts facts_of(object function)
@cython.locals(name=str)
cpdef bint mean_the_same(object meanings, object home) except -1
cpdef bint is_silent(Code code, object home) except -1
@cython.locals(known=Code)
cpdef Code code_of(object code)
cpdef object content(object cell, object empty)
