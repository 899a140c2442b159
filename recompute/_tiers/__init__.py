"""Where evicted bytes may go: host memory, disk, or whatever a `Tier` makes of it."""
