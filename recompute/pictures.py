"""Pictures of what a cache did (the extra `plot`)."""

from recompute._pictures import residency, save

__all__ = ["residency", "save"]
