cdef class Candidate:
    cdef public long long number
    cdef public long long size
    cdef public double cost
    cdef public double last_access
    cdef public long long locks
    cdef public Py_ssize_t slot


cdef class Around:
    cdef public double pressure

    cpdef measure_pressure(self, pool)
    cpdef bint unneeded(self, Candidate candidate) except -1
    cpdef double cost(self, Candidate candidate) except? -1
    cpdef double lower_bound(self, Candidate candidate) except? -1
    cpdef double room(self, pool) except? -1
    cpdef long long need(self, Candidate candidate, double enough=*) except? -1
