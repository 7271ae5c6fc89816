"""Search over settings: trials, their folders, and their ranking."""
