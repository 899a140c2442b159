cimport cython

from recompute._adapters.kind cimport Kind, Kinds
from recompute._context cimport current_cache
from recompute._engine.arguments cimport pack
from recompute._engine.arguments cimport bound
from recompute._engine.engine cimport Engine
from recompute._engine.graph cimport Operation, Value
from recompute._engine.requests cimport apply
from recompute._engine.requests cimport get as get_slowly

cdef Kinds kinds


cdef class Handle:
    cdef object __weakref__
    cdef public Engine _engine
    cdef public Value _node


@cython.locals(
    keep=list, found=list, positional=list, keywords=dict, arguments=tuple, engine=Engine, kind=Kind, handle=Handle, operation=Operation
)
cpdef apply_at(object function, tuple args, dict kwargs, object nout, object nbytes, object caller, object like)
