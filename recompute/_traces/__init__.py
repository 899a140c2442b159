"""Recorded programs: operations and steps, readers of their formats, and the writer that a running cache has."""
