"""How many bits the rows of each table need in checkpoints, measured on a trained model."""
