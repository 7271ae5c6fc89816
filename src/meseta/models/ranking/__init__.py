"""Models that score a sample of dense inputs and embeddings: one file each."""
