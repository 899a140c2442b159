"""Scans that hand stacks to each other: which steps keep what, and what runs again in blocks."""
