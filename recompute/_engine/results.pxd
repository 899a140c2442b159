cimport cython

from recompute._engine.graph cimport Operation, Storage, Value
from recompute._adapters.kind cimport Kind, Kinds
from recompute._engine.journal cimport Journal
from recompute._engine.machine cimport Machine
from recompute._engine.memory cimport Memory, own_memory
from recompute._engine.meter cimport Meter
from recompute._engine.pool cimport Pool

cdef Kinds kinds


cdef extern from *:
    """
    static CYTHON_INLINE PyObject *new_of(PyObject *cls) {
        PyObject *nothing = PyTuple_New(0);
        PyObject *made = nothing ? ((PyTypeObject *)cls)->tp_new((PyTypeObject *)cls, nothing, NULL) : NULL;
        Py_XDECREF(nothing);
        return made;
    }
    """
    object new_of(object)


cdef class Results:
    cdef object _fingerprints
    cdef Journal _journal
    cdef Memory _memory
    cdef Meter _meter
    cdef public bint fragile
    cdef public long long number
    cdef public dict samples
    cdef public set within

    @cython.locals(kind=Kind, value=Value, arguments=tuple, taken=bint, shared=dict, within=set)
    cpdef tuple measure(self, Operation operation, Py_ssize_t number, object payload, object declared=*)
    @cython.locals(value=Value, pool=Pool)
    cpdef Value add_source(self, object payload, long long size, object buffer, str device, object digest, bint moves=*)
    @cython.locals(value=Value, storage=Storage)
    cdef Value _new_value(self, object payload, Operation operation)
    @cython.locals(argument=Value, value=Value, storage=Storage, joined=Storage, shares=Storage, size="long long", outputs=list)
    cpdef create(self, Operation operation, list made, double cost)
    @cython.locals(memory=Memory)
    cdef _make_resident(self, Storage storage, long long size, object buffer, str device, str why=*)
    cdef _resize(self, Storage storage, long long size)
    @cython.locals(storage=Storage, shares=Storage, other=Value)
    cpdef restore(self, Value value, Operation operation, tuple made, str why)
    cpdef Storage new_storage(self, Storage like)
    @cython.locals(before=Storage)
    cpdef move(self, Value value, Operation operation, Storage storage)
    cpdef forget_storage(self, Storage storage)
    @cython.locals(change=double, storage=Storage, output=Value, storages=set)
    cpdef reprice(self, Operation operation, double cost)
    cdef _join(self, Value value, Operation operation, Storage storage, bint costs)


@cython.locals(kind=Kind)
cpdef buffer_of(object payload)
cpdef blank(object cls)
cpdef refer(object cls, object engine, Value value, object callback)
cpdef attach(object handle, object engine, Value value, object callback)
