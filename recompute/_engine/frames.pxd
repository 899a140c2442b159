cimport cython

from recompute._engine.changes cimport Call
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.machine cimport Machine
from recompute._engine.pool cimport Pool


cdef extern from "Python.h":
    unsigned long get_ident "PyThread_get_thread_ident" ()
    object ref "PyWeakref_NewRef" (object, object)


cdef list _NOTHING


cdef class Frame:
    cdef public tuple arguments
    cdef public object ask
    cdef public long long born
    cdef public object call
    cdef public object copy
    cdef public bint counts
    cdef public double elsewhere
    cdef public object engine
    cdef public list found
    cdef public object handle
    cdef public list handles
    cdef public Frame instead_of
    cdef public object key
    cdef public list locked
    cdef public Machine machine
    cdef public list missing
    cdef public object needs
    cdef public Operation operation
    cdef public Frame outer
    cdef public tuple reserved
    cdef public dict retries
    cdef public object rough
    cdef public bint running
    cdef public list stack
    cdef public long long thread
    cdef public Py_ssize_t waiting_below

    cpdef lock(self, Storage storage)
    @cython.locals(missing=list, locked=list, value=Value, storage=Storage, machine=Machine, operation=Operation, begins=bint, away=bint)
    cpdef lock_arguments(self, double now)
    @cython.locals(locked=list, storage=Storage, machine=Machine)
    cpdef unlock(self)
    @cython.locals(pool=Pool, size="long long", reserved=tuple)
    cpdef give_back(self)
    cpdef belongs_to(self, Call call)


cdef class Request(Frame):
    cdef public object result
    cdef public object then


cdef class Here:
    cdef public Frame frame
    cdef public unsigned long thread

    @cython.locals(frame=Frame)
    cpdef Frame innermost(self)


cdef class Running:
    cdef Here _newest
    cdef dict _threads

    @cython.locals(here=Here)
    cpdef Here here(self)
    cpdef Frame frame(self)
