"""Static planners: a whole schedule before the first operation runs, and the verifier that checks it."""
