cdef class Journal:
    cdef object _teller
    cdef object _telling
    cdef public list listeners
    cdef public object events
    cdef public long long operations
    cdef public long long evictions
    cdef public long long releases
    cdef public long long rematerializations
    cdef public long long recoveries
    cdef public long long coercions
