cimport cython

from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.functions cimport Code, Facts, code_of, content, facts_of
from recompute._engine.graph cimport Operation

cdef Kinds kinds

cdef dict _how
cdef dict _hints


cdef class LearntSizes:
    cdef dict _sizes

    @cython.locals(key=list)
    cpdef tuple key(self, object function, Operation operation, list payloads, dict keywords, bint exact)
    cpdef get(self, object key, Operation operation)
    cpdef guess(self, object key)
    cpdef learn(self, object key, object sizes, object rough=*)
    cdef _file(self, object key, object sizes)


@cython.locals(kind=Kind)
cpdef _nested(object payload, bint exact)
cpdef _part(object payload, bint exact, list left, int depth)
@cython.locals(kind=Kind)
cpdef _signed(object payload)
@cython.locals(facts=Facts, code=Code)
cpdef identity(object function)
cdef long long _total(object sizes) except -1
cpdef constant(object value, int depth=*)
@cython.locals(known=list)
cdef tuple _closed_over(Code code, object cells)
cdef str _known_by(object cls, object function)


cdef class SizeHints:
    cdef public bint alone
    cdef public bint expects


@cython.locals(known=SizeHints)
cpdef SizeHints size_hints(object cls)
