"""How a function becomes a planned function: options, trace, candidates, schedules, the search among them, a report."""
