"""Files of a checkpoint: blocks of tables, dense tensors, and their checksums."""
