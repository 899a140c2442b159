cimport cython

from recompute._adapters.kind cimport Kinds
from recompute._engine.engine cimport Engine
from recompute._engine.finalizer cimport Finalizer
from recompute._engine.frames cimport Frame
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.meter cimport Meter

cdef Kinds kinds


@cython.locals(frame=Frame)
cpdef list apply(Engine engine, Operation operation, object handle)
@cython.locals(finalizer=Finalizer, began=double)
cpdef settle(Engine engine)
cpdef get(Engine engine, Value value)
@cython.locals(storage=Storage, evictable=bint)
cpdef bint evict(Engine engine, Value value) except -1
cdef _note_found(Engine engine, object values)
