cimport cython

from recompute._engine.arguments cimport Seen
from recompute._engine.functions cimport Code, code_of, content, is_silent
from recompute._engine.graph cimport Operation, Value


cdef class _Search:
    cdef public dict found
    cdef public bint result
    cdef int _left
    cdef dict _seen

    cpdef add(self, object generator, object by)
    cpdef at(self, object value, int depth=*)
    cpdef function(self, object function, object owner, int depth)
    cpdef names(self, object function, object chains, int depth)
    cpdef instance(self, object value, int depth)


cdef _some_of(object container)
@cython.locals(search=_Search, value=Value)
cpdef reached_by(Operation operation)
cpdef bint _is_silent(object function) except -1
cpdef _Search _look(object part, _Search search)
