"""Processes that decode rows for trainers, and the one that tells these whom to ask. None of them loads torch."""
