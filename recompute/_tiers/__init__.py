"""Where evicted bytes may go: host memory, disk, or any other `Tier`."""
