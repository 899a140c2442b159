cimport cython

cdef dict _facts
cdef dict _codes


cdef class Code:
    cdef public object code
    cdef public object names
    cdef public object silent


cdef class Facts:
    cdef public object reference
    cdef public Code code
    cdef public object home
    cdef public bint closed
    cdef public bint bare


@cython.locals(known=Facts)
cpdef Facts facts_of(object function)
@cython.locals(known=Code)
cpdef Code code_of(object code)
