"""The machine under a run: its files, locks, processes, processors and memory. Imports no torch."""
