cimport cython
from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.functions cimport Code, Facts, code_of, facts_of
from recompute._engine.graph cimport Operation


cdef Kinds kinds


@cython.locals(filled=list)
cpdef list fill(object parts, bint again=*)
cpdef dict keywords_of(Operation operation, bint again=*)
cpdef pack(object argument, list keep, list found)
@cython.locals(kind=Kind)
cpdef _pack(object argument, list keep, list found, int depth)


@cython.locals(facts=Facts)
cpdef bound(object function)
cdef _names_of(Code code)
