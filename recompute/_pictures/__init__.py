"""Pictures: what was in memory when, how full the budget was, and what policies and planners cost."""
