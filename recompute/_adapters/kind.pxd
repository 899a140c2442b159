cdef class Kind:
    cdef public object adapter
    cdef public object array
    cdef public bint atomic
    cdef public object buffer
    cdef public bint content
    cdef public object destroyed
    cdef public object device
    cdef public object enter
    cdef public object evicted
    cdef public object freeze
    cdef public bint handle
    cdef public int inert
    cdef public object nbytes
    cdef public object outlive
    cdef public object part_of_result
    cdef public bint plain
    cdef public bint readonce
    cdef public object remember
    cdef public object restored
    cdef public object signature
    cdef public bint silent
    cdef public bint outlines
    cdef public object timer
    cdef public object vacate
    cdef public object watch


cdef class Kinds:
    cdef dict _known
    cdef object _resolve

    cpdef Kind get(self, object cls)
    cpdef Kind of(self, object cls)
