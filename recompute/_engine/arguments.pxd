cimport cython
from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.functions cimport Code, Facts, code_of, content, facts_of
from recompute._engine.graph cimport Operation


cdef extern from *:
    """
    static CYTHON_INLINE int alike(PyObject *one, PyObject *other) {
        PyFunctionObject *copy = (PyFunctionObject *)one, *function = (PyFunctionObject *)other;
        return copy->func_code == function->func_code && copy->func_globals == function->func_globals
            && copy->func_defaults == function->func_defaults && copy->func_kwdefaults == function->func_kwdefaults
            && copy->func_name == function->func_name && copy->func_qualname == function->func_qualname
            && (function->func_dict == NULL || PyDict_GET_SIZE(function->func_dict) == 0);
    }
    """
    bint alike(object, object)


cdef Kinds kinds


@cython.locals(filled=list)
cpdef list fill(object parts, bint again=*)
cpdef dict keywords_of(Operation operation, bint again=*)
cpdef pack(object argument, list keep, list found)
@cython.locals(kind=Kind)
cpdef _pack(object argument, list keep, list found, int depth)


@cython.locals(facts=Facts, kind=Kind)
cpdef bound(object function)
cdef _Names _names_of(Code code)
cdef _closed(object function, Facts facts)
@cython.locals(mine=tuple, theirs=tuple, names=_Names, number=Py_ssize_t, cell=object, other=object)
cdef bint _sees_the_same(object copy, object function, Code code) except -1


cdef class _Names:
    cdef public set bound_here
    cdef public tuple read_globals


cdef class Method:
    cdef object __weakref__
    cdef public object func
    cdef public object again
    cdef public bint ran


cdef class Seen:
    cdef object __weakref__
    cdef public object func
    cdef public dict values
