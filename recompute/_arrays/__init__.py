"""Arrays whose operations are remembered: array code runs on them unchanged.

_namespace   `array`, which wraps; the functions of an array library, with wrapped arrays as results
_array       RecomputableArray: elements and operators; the objects that hang on it: methods, `x.flat`, `x.at`
_attributes  what is known of a wrapped array without its content; its views; made plain, a number, a text, a copy
_dispatch    the protocols by which array libraries hand their functions over (NEP 13, NEP 18)
_writes      what changes an array in place: a new version of it and of its views
_operate     one operation, and how it is repeated: operands to values, plain arrays to sources, results to arrays
_sharing     which arrays share memory, and how each is made of the one at the root
"""
