cimport cython

from recompute._engine.frames cimport Frame
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.machine cimport Machine
from recompute._engine.neighbours cimport Neighbourhood
from recompute._engine.pool cimport Pool
from recompute._engine.sizes cimport LearntSizes


cdef class Memory:
    cdef object __weakref__
    cdef public object policy
    cdef public object search
    cdef public object limits
    cdef public bint unlimited
    cdef public bint lenient
    cdef public bint closing
    cdef public bint counts_whole
    cdef public long long smallest
    cdef public dict pools
    cdef public set storages
    cdef public LearntSizes sizes
    cdef public object advice
    cdef public object story
    cdef public Neighbourhood neighbourhood
    cdef public Machine machine
    cdef public object tiers
    cdef object _finalizer
    cdef Pool _newest
    cdef bint _always_reserves
    cdef public bint only_declared

    @cython.locals(pool=Pool)
    cpdef Pool pool(self, str device)
    @cython.locals(by_pool=dict, pool=Pool)
    cpdef dict by_pool(self, object needs)
    @cython.locals(pool=Pool, size="long long")
    cpdef bint reserve(self, Frame frame, object needs) except -1
    @cython.locals(output=Value, storage=Storage, pool=Pool, size="long long")
    cpdef bint reserve_for(self, Frame frame, Operation operation) except -1
    @cython.locals(operation=Operation, pool=Pool, size="long long", extra="long long", room="long long", shares=Storage, own=bint)
    cpdef dict shortage(self, Frame frame, list made)
    @cython.locals(victims=list, victim=Storage)
    cpdef list victims(self, Pool pool, long long size, double now)
    cpdef list _choose(self, Pool pool, double now)
    @cython.locals(victim=Storage, chosen=list, used="long long", limit=double)
    cpdef list _pruned(self, Pool pool, long long size, double now, list victims)
    cpdef evicted(self, Storage storage, str why)
    cpdef add_cost(self, Storage storage, double change)


cpdef _cost_fell(Storage storage)
cpdef list own_memory(list made)
@cython.locals(size="long long", expected="long long", device=str, name=str)
cpdef bint is_expected(list made, object needs) except -1
