"""Reports of runs, exports to other tools, and stories of values. Imported when one is asked for."""
