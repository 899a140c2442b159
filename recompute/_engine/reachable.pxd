cimport cython

from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.arguments cimport Seen
from recompute._engine.functions cimport Code, Facts, content, facts_of, is_silent
from recompute._engine.graph cimport Operation, Value

cdef Kinds kinds


cdef class _Search:
    cdef public dict found
    cdef public bint result
    cdef int _left
    cdef dict _seen

    cpdef add(self, object generator, object by)
    cpdef at(self, object value, int depth=*)
    @cython.locals(facts=Facts)
    cpdef function(self, object function, object owner, int depth)
    cpdef names(self, object function, object chains, int depth)
    cpdef instance(self, object value, int depth)


cdef _some_of(object container)
cdef list _first(object parts, Py_ssize_t most)
@cython.locals(search=_Search, value=Value)
cpdef reached_by(Operation operation)
@cython.locals(kind=Kind)
cdef bint _is_inert(object part) except -1
@cython.locals(facts=Facts)
cdef bint _is_silent(object function) except -1
cdef bint _names_nothing(object function, Code code, object owner) except -1
cpdef _Search _look(object part, _Search search)
