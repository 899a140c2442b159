cimport cython

cdef double _TINY


@cython.locals(ratio=double, total=double)
cpdef double steepness(double cost, double neighbours, long long size, double power) except? -1
