"""From a prepared dataset to batches: the order of its rows, decoding, cutting."""
