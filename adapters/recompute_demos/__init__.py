"""What `recompute demo` runs: programs on real input, once without a budget and once within a small one.

edits, letters      a demo each, with the algorithm first
_twice              what they have in common

They are plug-ins, in the group of entry points `recompute.demos`: functions that take `budget`, `picture`, `echo` and
`progress`, and return figures that JSON can hold.
"""
