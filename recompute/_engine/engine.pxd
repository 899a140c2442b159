cimport cython

from recompute._engine.changes cimport Call, Changes
from recompute._engine.finalizer cimport Finalizer
from recompute._engine.frames cimport Frame, Here, Request, Running
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.journal cimport Journal
from recompute._engine.machine cimport Machine
from recompute._engine.memory cimport Memory, is_expected, own_memory
from recompute._engine.meter cimport Meter
from recompute._engine.pool cimport Pool
from recompute._engine.references cimport References
from recompute._engine.results cimport Results, refer
from recompute._engine.runs cimport Runs
from recompute._engine.scheduler cimport Scheduler
from recompute._engine.settling cimport Settling


cdef Running running


cdef class Engine:
    cdef object __weakref__
    cdef public object cache
    cdef public object options
    cdef public object fingerprints
    cdef public Changes changes
    cdef public Journal journal
    cdef public Meter meter
    cdef public Finalizer finalizer
    cdef public Memory memory
    cdef public Machine machine
    cdef public Scheduler scheduler
    cdef public Results results
    cdef public Runs runs
    cdef public References references
    cdef public object moving
    cdef public Settling settling
    cdef public object thrashing
    cdef public bint observed
    cdef public bint watchful
    cdef public object note
    cdef public object before
    cdef public object wanted
    cdef public object pressed
    cdef public bint is_pressed
    cdef public long long reads
    cdef public object wall
    cdef public object hold
    cdef public object unadvised
    cdef bint _foreign
    cdef dict _ranking

    @cython.locals(victim=Storage, collected=bint, found=bint, fits=bint, there=bint, ranked=bint, asks=bint, evicted=Py_ssize_t, most=Py_ssize_t)
    cpdef allocate(self, Pool pool, long long size, Frame frame, Operation what)
    @cython.locals(stack=list, here=Here, outer=Frame, frame=Frame, start=double, cost=double, made=list, call=Call, meter=Meter, began=double, spent=double,
        repeated="long long")
    cpdef perform(self, Frame bottom)
    cpdef bint evict(self, Storage storage, str why, bint watch=*) except -1
    cpdef Frame rematerialize(self, list stack)
    cpdef _start_over(self, Frame frame)
    @cython.locals(frame=Frame, fetching=Frame, operation=Operation, missing=Value, scheduler=Scheduler)
    cpdef Frame _next(self, list stack)
    @cython.locals(operation=Operation, pool=Pool)
    cpdef bint _reserve(self, Frame frame) except -1
    cpdef _start(self, Frame frame)
    cpdef _stop(self, Frame frame)
    cpdef _make_room_for(self, Frame frame, list made)
    cpdef bint _let_arguments_go(self, Frame frame, list made) except -1
    @cython.locals(operation=Operation, memory=Memory, results=Results, value=Value, classes=list, number=Py_ssize_t, following=Frame, fits=bint, again=bint, meter=Meter)
    cpdef Frame _store(self, Frame frame, list made, double cost)
    @cython.locals(value=Value, made=list)
    cdef _restore(self, Operation operation, list made, str why)
    @cython.locals(scheduler=Scheduler, operation=Operation, storage=Storage, locked=list, stack=list, other=Frame)
    cpdef leave(self, Frame frame)
    cpdef _abandon(self, Frame bottom)
