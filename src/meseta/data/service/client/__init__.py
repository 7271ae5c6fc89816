"""Client of the reader service: batches whose rows reader processes decode."""
