"""Static planners: a whole schedule before the first operation runs, and the judge that checks it."""
