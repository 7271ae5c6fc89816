"""Watchers that report storage that does not respond, and memory that is nearly exhausted."""
