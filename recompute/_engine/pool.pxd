from recompute._policy.search cimport Candidates


cdef class Pool:
    cdef public object adaptive
    cdef public dict asking
    cdef public long long beside
    cdef public Candidates candidates
    cdef public long long departing
    cdef public str device
    cdef public long long fixed
    cdef public long long held
    cdef public double limit
    cdef public long long movable
    cdef public long long overshoot
    cdef public long long past
    cdef public long long peak
    cdef public long long pinned
    cdef public long long smallest
    cdef public long long sources
    cdef public object tiers
    cdef public long long used

    cpdef note(self, long long used)
