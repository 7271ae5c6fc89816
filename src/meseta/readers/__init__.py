"""Reader processes that decode rows for trainers, and the dispatcher that assigns windows to them. None loads torch."""
