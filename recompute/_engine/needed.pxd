cimport cython

from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.neighbours cimport Neighbourhood, above, below, fetch, stride_below
from recompute._engine.pool cimport Pool
from recompute._policy.candidate cimport Candidate

cdef Py_ssize_t _UP, _DOWN, _WIDE, _ENDS, _REACH, _OPERATIONS


cdef class Needs(Neighbourhood):
    cdef bint _costs_given
    cdef readonly dict _needs
    cdef readonly dict _needed_by
    cdef readonly dict _missing
    cdef readonly dict _missing_bytes
    cdef dict _segments
    cdef tuple _last
    cdef long long _walks
    cdef public Py_ssize_t reach

    @cython.locals(step=double)
    cpdef measure_pressure(self, pool)
    @cython.locals(storage=Storage)
    cpdef bint unneeded(self, Candidate candidate) except -1
    cpdef bint wanted(self, Storage storage) except -1
    cpdef evicted(self, Storage storage)
    cpdef restored(self, Storage storage)
    cpdef released(self, Storage storage)
    cdef _no_longer_missing(self, Storage storage)
    @cython.locals(stack=list, needed=Storage, argument=Storage, arguments=tuple)
    cdef _count(self, Storage storage)
    @cython.locals(stack=list, argument=Storage, left=Py_ssize_t)
    cdef _discount(self, Storage storage)
    @cython.locals(home=Pool)
    cpdef double room(self, pool) except? -1
    @cython.locals(
        storage=Storage, needs=dict, walk="long long", homes=list, visited=Storage, descendant=Storage, path=list,
        known=dict, home=Storage, value=Value, operation=Operation, ends=Py_ssize_t, argument=Value, maker=Operation,
        away=bint, output=Value, total="long long",
    )
    cpdef long long need(self, Candidate candidate, double enough=*) except? -1
    @cython.locals(storage=Storage, needed=double, unneeded=double)
    cpdef double cost(self, Candidate candidate) except? -1
    @cython.locals(storage=Storage, needed=double, unneeded=double)
    cpdef double lower_bound(self, Candidate candidate) except? -1
    cpdef own_cost_changed(self, Storage storage, double change)
    cpdef unlinking(self, Storage storage)
    @cython.locals(walk="long long", path=list, visited=Storage, neighbour=Storage)
    cdef _decreased_from(self, Storage storage, Py_ssize_t side)
    cdef _decreased(self, Storage storage)
    cdef double _weigh(self, double needed, double unneeded) except? -1
    @cython.locals(up=tuple, down=tuple, needed=double, unneeded=double)
    cdef (double, double) _walk(self, Storage storage) except *
    cdef long long _begin(self, Storage storage) except? -1
    @cython.locals(
        cost=double, walk="long long", path=list, ends=list, visited=Storage, value=Value, operation=Operation,
        argument=Value, ancestor=Storage, front=list, segment=tuple,
    )
    cdef tuple _walk_up(self, Storage storage)
    @cython.locals(cost=double, walk="long long", path=list, visited=Storage, ancestor=Storage)
    cdef tuple _checked(self, tuple segment, Storage storage)
    @cython.locals(
        cost=double, unneeded=double, walk="long long", path=list, ends=list, visited=Storage, needs=dict,
        stride=Py_ssize_t, descendant=Storage,
    )
    cdef tuple _walk_down(self, Storage storage)
    @cython.locals(storage=Storage)
    cdef tuple _extrapolate(self, Py_ssize_t side, double cost, list front, long long walk)
    cdef tuple _segment(self, Storage storage, Py_ssize_t side)
    @cython.locals(
        cost=double, looked=Py_ssize_t, path=list, seen=set, ends=list, visited=Storage, neighbour=Storage, wanted=bint,
    )
    cdef tuple _look(self, Storage storage, Py_ssize_t side)


cpdef long long _number(Operation operation) except? -1
@cython.locals(
    missing=dict, there=set, argument=Value, output=Value, maker=Operation, home=Storage, kept="long long",
    most="long long", own="long long", beyond="long long",
)
cdef long long _locked(Operation operation, Storage gone, dict known) except? -1
