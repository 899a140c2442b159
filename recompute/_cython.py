"""Stands for the module `cython` in the plain form, and for type checkers: the form needs nothing but Python.

A compiled module that uses it begins so:

    from recompute import _cython as cython

    if cython.compiled:
        import cython  # read by Cython, and never run

Types are in its `.pxd`.
"""

compiled = False
