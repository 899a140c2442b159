cimport cython

from recompute._engine.functions cimport Code, Facts, code_of, facts_of

@cython.locals(facts=Facts)
cpdef bound(object function)
cdef _names_of(Code code)
