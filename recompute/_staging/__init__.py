"""Staging: a function recorded once, planned with the future known, and run as a straight line from then on."""
