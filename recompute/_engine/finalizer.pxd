cimport cython

from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.graph cimport Held, Storage, Value
from recompute._engine.machine cimport Machine
from recompute._engine.pool cimport Pool

cdef Kinds kinds


cdef extern from "Python.h":
    object new_ref "PyWeakref_NewRef" (object, object)


cdef object _weak(object thing)
cdef int _references(Value value) except -1


cdef class Departure:
    cdef public object buffer
    cdef public object call
    cdef public object copy
    cdef public list following
    cdef public bint full
    cdef public list guarded
    cdef public object held
    cdef public long long number
    cdef public long long owner
    cdef public list payloads
    cdef public Pool pool
    cdef public long long size
    cdef public Storage storage
    cdef public bint taken
    cdef public bint told
    cdef public bint vacates
    cdef public bint watch
    cdef public object watched
    cdef public dict weak
    cdef public object why

    @cython.locals(kind=Kind, value=Value, referred=bint)
    cdef _collect(self)
    @cython.locals(value=Value)
    cpdef take(self)
    @cython.locals(kind=Kind, value=Value, held=Held)
    cpdef tell_adapters(self, object note, object settle)


cdef class Finalizer:
    cdef public Machine machine
    cdef public object queue
    cdef public set stays
    cdef public list garbage
    cdef public dict departures
    cdef public object interrupts

    @cython.locals(departure=Departure, kind=Kind, value=Value)
    cpdef depart(self, Storage storage, bint watch, object copy=*)
    cpdef destroy_garbage(self)
