"""Which value to evict: the formulas, the evicted neighbourhoods, and the search for the smallest score."""
