"""Recorded programs: what they are made of, how they are read, and how a running cache writes one."""
