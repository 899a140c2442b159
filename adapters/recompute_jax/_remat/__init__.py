"""How a function becomes a planned function.

1. `remat` checks the options; `jitted` is what is called: as `jax.jit`'s functions are, with a plan for each signature.
2. `traced` traces it for arguments of some types; inside of `grad` it is one operation with a gradient of its own
   (`differentiated`).
3. `search` makes `candidates`: what to keep, by the library's planner, for a `ladder` of budgets. Conditionals may keep
   less (`joined`), and the `bodies` of loops are planned as functions of their own.
4. A candidate in regions behind gates is a `schedule`; it is compiled for a look at its memory (`compile`), and the
   cheapest that fits is taken.
5. What comes of it is equations in a new order, and a `report`. Its `recipe` can be `saved`, and `followed` later.
"""
