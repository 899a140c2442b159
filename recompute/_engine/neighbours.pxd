cimport cython

from recompute._engine.graph cimport Operation, Storage, Value
from recompute._policy.candidate cimport Around, Candidate

cdef double _MARGIN


cdef class Neighbourhood(Around):
    cdef public object on_decrease
    cdef public bint active
    cdef public bint tiers
    cdef public bint keeps
    cdef public long long missing
    cdef public set kept
    cdef public list unwanted

    cpdef bint wanted(self, Storage storage) except -1
    cpdef evicted(self, Storage storage)
    cpdef restored(self, Storage storage)
    cpdef released(self, Storage storage)
    cpdef own_cost_changed(self, Storage storage, double change)
    cpdef unlinking(self, Storage storage)


cdef class NoNeighbours(Neighbourhood):
    pass


cdef class Closure(Neighbourhood):
    cdef public bint descendants

    @cython.locals(storage=Storage, total=double)
    cpdef double cost(self, Candidate candidate) except? -1
    cpdef restored(self, Storage storage)
    cpdef own_cost_changed(self, Storage storage, double change)
    cpdef unlinking(self, Storage storage)


@cython.locals(value=Value, argument=Value, found=list)
cpdef list above(Storage storage)
@cython.locals(value=Value, found=list)
cpdef list below(Storage storage, Py_ssize_t stride=*)
@cython.locals(output=Value)
cdef _add_made(Operation operation, list found)
@cython.locals(value=Value, stride=Py_ssize_t)
cpdef Py_ssize_t stride_below(Storage storage, Py_ssize_t most) except -1
@cython.locals(found=list, near=list, neighbour=Storage)
cpdef list evicted_neighbours(Storage storage)
@cython.locals(value=Value)
cpdef double fetch(Storage storage) except? -1


cdef class Component:
    cdef public Component parent
    cdef public long long weight
    cdef public double cost
    cdef public long long members
    cdef public double lower_bound
    cdef public set candidates
    cdef public Py_ssize_t compact_at

    @cython.locals(node=Component)
    cpdef Component root(self)


cdef class Components(Neighbourhood):
    @cython.locals(storage=Storage, total=double, root=Component)
    cpdef double cost(self, Candidate candidate) except? -1
    @cython.locals(storage=Storage, total=double, bound=double, root=Component, candidates=set)
    cpdef double lower_bound(self, Candidate candidate) except? -1
    @cython.locals(found=set, neighbour=Storage)
    cdef set _roots_around(self, Storage storage)
    cpdef Component root(self, Storage storage)
    @cython.locals(neighbour=Storage, own=Component, other=Component)
    cpdef evicted(self, Storage storage)
    @cython.locals(root=Component)
    cpdef restored(self, Storage storage)
    @cython.locals(neighbour=Storage)
    cpdef unlinking(self, Storage storage)
    cpdef own_cost_changed(self, Storage storage, double change)
    cdef _add_cost(self, Component root, double change)
    cdef Component _enter(self, Storage storage)
    cpdef Component _union(self, Component a, Component b)
    @cython.locals(own=Component, neighbour=Storage, stack=list)
    cdef Component _join_around(self, Storage storage)
