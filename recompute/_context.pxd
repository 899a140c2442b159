cdef dict _setting
cdef dict _left
cdef list _default

cpdef current_cache()
cpdef default_cache()
cpdef bint is_default(object cache)
cpdef bint is_entered(object cache)
cpdef enter(object cache)
cpdef leave(object cache)
cdef _change(tuple entered, tuple interrupted)
cdef list _inner()
cdef _set(tuple entered)
