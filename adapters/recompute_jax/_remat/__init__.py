"""`remat`: options, candidates, the search for the budget, compilations, the report."""
