"""Reader processes, and the dispatcher that assigns windows to them. None of them loads torch."""
