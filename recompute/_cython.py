"""Stands for the module `cython` in the plain form, and for type checkers: the form needs nothing but Python.

A compiled module that uses it begins so:

    from recompute import _cython as cython

    if cython.compiled:
        import cython  # read by Cython, and never run

Types are in its `.pxd`. What is here is what a `.pxd` cannot say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Class = TypeVar("Class", bound=type)

compiled = False


def cclass(cls: Class) -> Class:
    """An extension type. Its `.pxd` says so too, but the decorators below are heeded only together with this one."""
    return cls


def trashcan(*, on: bool) -> Callable[[Class], Class]:
    """A long chain of such objects is freed without recursion."""
    return cclass


def no_gc(cls: Class) -> Class:
    """The collector does not see such objects: they must not be part of a cycle."""
    return cls
