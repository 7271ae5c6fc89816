"""Choosing settings by training: `meseta sweep`, and the trials that find a rate before a run."""
