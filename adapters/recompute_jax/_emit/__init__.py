"""A plan as a function that JAX can trace: regions behind gates."""
