"""Watchers that report what a run waits for: storage that does not answer, and memory that runs out."""
