"""A traced function as data: flat equations, what they cost, segments for the planners; and as equations again."""
