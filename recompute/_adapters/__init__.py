"""What the cache asks of a type of values: the protocol of adapters, and plain Python objects."""
