"""A training run from config to report."""
