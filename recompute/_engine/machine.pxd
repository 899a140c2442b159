cimport cython

from recompute._engine.graph cimport Held, Storage, Value
from recompute._engine.neighbours cimport Neighbourhood
from recompute._engine.pool cimport Pool


cdef tuple _MAY
cdef int _IN_MEMORY, _EVICTED, _LOST


cdef class Machine:
    cdef public Neighbourhood neighbourhood
    cdef public set held
    cdef public object watch

    @cython.locals(before=int, pool=Pool, size="long long", in_memory=bint, lost=bint, may=int)
    cpdef move(self, Storage storage, int state, str why=*)
    cpdef enter(self, Storage storage, Pool pool, long long size, object buffer, double now, str why=*)
    @cython.locals(kind=int)
    cpdef settle(self, Storage storage)
    cpdef come_back(self, Storage storage, str why)
    @cython.locals(pool=Pool)
    cpdef lock(self, Storage storage)
    @cython.locals(pool=Pool)
    cpdef unlock(self, Storage storage)
    cpdef pin(self, Storage storage)
    cpdef unpin(self, Storage storage)
    @cython.locals(pool=Pool)
    cdef _admit(self, Storage storage)
    cpdef take(self, Pool pool, long long size)
    @cython.locals(pool=Pool, change="long long")
    cpdef resize(self, Storage storage, long long size, long long pins)
    cpdef reserve(self, Pool pool, long long size)
    cpdef give_back(self, Pool pool, long long size)
    cpdef depart(self, Pool pool, long long size)
    cpdef departed(self, Pool pool, long long size)
    cpdef hold(self, Held held)
    @cython.locals(storage=Storage)
    cpdef bint let_go(self, Held held) except -1


@cython.locals(kind=int, value=Value)
cpdef int kind_of(Storage storage) except -1
