"""How the cache sees arrays: sizes, devices, and what is not an operation's cost."""
