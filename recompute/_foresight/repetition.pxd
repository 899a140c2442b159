cimport cython

from recompute._engine.engine cimport Engine
from recompute._engine.graph cimport Operation, Storage, Value
from recompute._engine.memory cimport Memory
from recompute._engine.pool cimport Pool


cdef long long _CONTEXT
cdef long long _LEAST
cdef long long _SHORTEST
cdef long long _MODULUS
cdef long long _BASE
cdef long long _GONE
cdef long long _PATIENCE
cdef double _GROWTH
cdef double _LOW
cdef long long _FIRST


cdef class Repetition:
    cdef public bint inside
    cdef public bint useful
    cdef public bint whole
    cdef Engine _engine
    cdef object _tell
    cdef tuple _pools
    cdef unsigned long _thread
    cdef long long _reads
    cdef long long _mask
    cdef long long _most
    cdef long long _number
    cdef long long[::1] _tokens
    cdef long long[::1] _missing
    cdef long long[::1] _loads
    cdef long long[::1] _last_place
    cdef long long _context
    cdef long long _period
    cdef long long _same
    cdef long long _look_at
    cdef long long _lap
    cdef long long _length
    cdef long long _position
    cdef long long _first
    cdef long long _low
    cdef long long _off

    @cython.locals(engine=Engine, memory=Memory, pool=Pool, used="long long", reads="long long", what=cython.int)
    cpdef before(self, Operation operation)
    @cython.locals(number="long long", place="long long", gone="long long", context="long long", before="long long")
    cpdef int see(self, long long token, long long missing, long long used) except -1
    @cython.locals(size="long long", context="long long", number="long long", gone="long long")
    cdef _grow(self)
    @cython.locals(period="long long")
    cdef _compare(self, long long number, long long token)
    @cython.locals(period="long long", most="long long", same="long long")
    cdef _try(self, long long number, long long before)
    @cython.locals(period="long long", enough="long long", whole="long long")
    cdef bint _is_round(self, long long number) except -1
    @cython.locals(made="long long", first="long long", start="long long", last="long long", at="long long", now="long long", grown="long long")
    cdef bint _is_steady(self, long long number, long long whole) except -1
    cdef long long _wanted(self, long long number) except? -1
    @cython.locals(period="long long", begins="long long", most="long long", least="long long", at="long long")
    cdef _adopt(self, long long number)
    @cython.locals(best="long long", at="long long", one="long long", other="long long", more="long long")
    cdef long long _beginning(self, long long number, long long period) except? -1
    @cython.locals(position="long long", length="long long", in_step=bint, low=bint, begins=bint, other=bint, longer=bint)
    cdef int _go_on(self, long long number, long long token, long long wanted) except -1


@cython.locals(name="long long", size="long long", argument=Value)
cdef long long _token(Operation operation) except? -1
