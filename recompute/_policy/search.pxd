cimport cython

from recompute._policy.candidate cimport Around, Candidate
from recompute._policy.formulas cimport steepness
from recompute._policy.tournament cimport Tournament

cdef double _UNNEEDED
cdef double _STEEPER


cdef class Candidates:
    cdef public object policy
    cdef public Around around
    cdef public double pressure
    cdef public long long scored
    cdef public object pool
    cdef public object tiers
    cdef Py_ssize_t _choices

    cpdef add(self, Candidate candidate)
    cpdef remove(self, Candidate candidate)
    cpdef changed(self, Candidate candidate)
    cpdef list choose(self, double now)
    cpdef list _looked_at(self)
    cdef bint _unneeded(self, Candidate candidate) except -1
    cpdef _update_pressure(self)


cdef class Tournaments(Candidates):
    cdef list _in_slot
    cdef Py_ssize_t _gaps
    cdef set _changed
    cdef Tournament _tournament
    cdef object _policy
    cdef double _power
    cdef double _pressure
    cdef bint _alone
    cdef dict _needs
    cdef double _time
    cdef Py_ssize_t _passed

    @cython.locals(slot=Py_ssize_t)
    cpdef add(self, Candidate candidate)
    @cython.locals(slot=Py_ssize_t)
    cpdef remove(self, Candidate candidate)
    cpdef changed(self, Candidate candidate)
    @cython.locals(
        tournament=Tournament, slot=Py_ssize_t, candidate=Candidate,
        known_base=double, known_slope=double, neighbours=double, origin=double, accessed=double, base=double, slope=double,
        enough=double, passed=Candidate, least="long long", tries=Py_ssize_t, need="long long",
    )
    cpdef list choose(self, double now)
    cdef bint _is_dropped(self, Candidate candidate, double neighbours) except -1
    cdef long long _need(self, Candidate candidate, double now, double enough) except? -1
    @cython.locals(cost=double, base=double, slope=double)
    cdef (double, double) _line(self, Candidate candidate, double neighbours) except *
    @cython.locals(tournament=Tournament, slot=Py_ssize_t, candidate=Candidate, base=double, slope=double)
    cdef Tournament _update(self, double now)
    @cython.locals(tournament=Tournament, slot=Py_ssize_t, candidate=Candidate, base=double, slope=double)
    cdef Tournament _build(self, double now)
    @cython.locals(slot=Py_ssize_t, kept=list, candidate=Candidate)
    cdef _compact(self)
