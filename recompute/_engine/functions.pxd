cimport cython


cdef extern from *:
    """
    #define refers_to(reference, object) (PyWeakref_GET_OBJECT(reference) == (object))

    static CYTHON_INLINE PyObject *content(PyObject *cell, PyObject *empty) {
        PyObject *bound = PyCell_GET(cell);
        return Py_NewRef(bound == NULL ? empty : bound);
    }

    static CYTHON_INLINE int alike(PyObject *one, PyObject *other) {
        PyFunctionObject *copy = (PyFunctionObject *)one, *function = (PyFunctionObject *)other;
        return copy->func_code == function->func_code && copy->func_globals == function->func_globals
            && copy->func_defaults == function->func_defaults && copy->func_kwdefaults == function->func_kwdefaults
            && copy->func_name == function->func_name && copy->func_qualname == function->func_qualname
            && (function->func_dict == NULL || PyDict_GET_SIZE(function->func_dict) == 0);
    }
    """
    bint refers_to(object, object)
    object content(object, object)
    bint alike(object, object)


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
