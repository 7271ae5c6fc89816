"""Start of a run from the weights of another one, its parent."""
