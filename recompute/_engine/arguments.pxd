cimport cython

from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.graph cimport Operation

cdef Kinds kinds


@cython.locals(filled=list)
cpdef list fill(object parts, bint again=*)
cpdef dict keywords_of(Operation operation, bint again=*)
cpdef pack(object argument, list keep, list found)
@cython.locals(kind=Kind)
cpdef _pack(object argument, list keep, list found, int depth)
