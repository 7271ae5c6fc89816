"""Training, evaluation and prediction with a config."""
