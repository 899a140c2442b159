"""A traced function as data: flat equations, what they cost, what XLA fuses, segments for the planners."""
