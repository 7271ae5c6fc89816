"""From raw click logs to batches: `prepare` writes a dataset directory, `Reader` streams it."""
