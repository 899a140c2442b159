cimport cython

from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.arguments cimport fill, keywords_of
from recompute._engine.changes cimport Changes
from recompute._engine.frames cimport Frame, Here
from recompute._engine.graph cimport Operation, Value
from recompute._engine.memory cimport Memory
from recompute._engine.meter cimport Meter
from recompute._engine.reachable cimport reached_by
from recompute._engine.results cimport Results
from recompute._engine.sizes cimport LearntSizes, identity, size_hints

cdef Kinds kinds


@cython.locals(value=Value, kind=Kind)
cdef _repeated(Operation operation)


cdef class Runs:
    cdef Changes _changes
    cdef Memory _memory
    cdef Meter _meter
    cdef Results _results
    cdef object _fingerprints
    cdef object _room

    @cython.locals(operation=Operation, argument=Value, sizes=LearntSizes, payloads=list, keywords=dict)
    cpdef expect(self, Frame frame)
    @cython.locals(operation=Operation)
    cpdef bint is_sure(self, Frame frame) except -1
    @cython.locals(operation=Operation, argument=Value, arguments=tuple, start=double, cost=double, meter=Meter)
    cpdef tuple run(self, Frame frame, Here here, Frame outer)
