"""Conditionals and scans that pass values to each other: what they keep, and what runs again."""
