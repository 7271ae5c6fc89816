"""Exchange of models, metrics and tables with other programs."""
