"""Adapters: what the cache asks of the values of a framework. Subclass `Adapter`, or `ArrayAdapter`, and register it.

An adapter of a package is found by its entry point, in the group `recompute.adapters`: see docs/adapters.md.
"""

from __future__ import annotations

from recompute._adapters.adapter import Adapter, register
from recompute._adapters.arrays import ArrayAdapter, Outline

__all__ = ["Adapter", "ArrayAdapter", "Outline", "register"]
