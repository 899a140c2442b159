cdef dict _setting
cdef dict _left
cdef list _default

cpdef current_cache()
cpdef default_cache()
cpdef bint is_default(object cache)
cpdef bint is_entered(object cache)
cpdef Py_ssize_t times_entered(object cache) except -1
cpdef enter(object cache)
cpdef leave(object cache)
cdef _change(tuple entered, tuple interrupted)
cdef list _inner()
cdef _set(tuple entered)
cdef _whole(object step, list raised)
cdef bint _interrupted(object error)
