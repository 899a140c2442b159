"""What people look at: the report of a run, its exports, the story of a value. Imported when it is asked for."""
