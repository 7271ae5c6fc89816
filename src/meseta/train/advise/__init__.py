"""Choice of the number of bits per table in checkpoints, by measuring a trained model."""
