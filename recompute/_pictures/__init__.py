"""Pictures: when values were in memory, how full the budget was, and the overhead of policies and planners."""
