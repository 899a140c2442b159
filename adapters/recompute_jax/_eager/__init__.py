"""Functions that run equation by equation, or as one operation, through the cache."""
