cimport cython


cdef extern from *:
    """
    static int refers_to(PyObject *reference, PyObject *object) {
    #if PY_VERSION_HEX < 0x030D0000
        return PyWeakref_GET_OBJECT(reference) == object;
    #else  // the other is not there from 3.15 on
        PyObject *found = NULL;
        int refers = PyWeakref_GetRef(reference, &found) == 1 && found == object;
        Py_XDECREF(found);
        return refers;
    #endif
    }
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
    cdef public object owner
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
cpdef bint is_silent(Code code, object owner, object home) except -1
@cython.locals(known=Code)
cpdef Code code_of(object code)
cpdef object content(object cell, object empty)
