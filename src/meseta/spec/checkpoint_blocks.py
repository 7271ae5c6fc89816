"""Blocks of a checkpoint: how many rows each has, and how many a save holds at a time; `checkpoint.save` is built of
these numbers, and memory is predicted by them."""

from __future__ import annotations

BLOCK_BYTES = 32 << 20
"""A block holds the largest power of two of rows that fits here, so 16 to 32 MiB. What a rank receives in one round of
an exchange has no more, and neither has what it sends to one rank."""
NUM_PENDING_WRITES = 4
"""Rounds that a rank writes while it exchanges the next one: some are summed while the disk takes others."""
NUM_PARALLEL_READS, NUM_PARALLEL_CHAIN_READS = 6, 3
"""Blocks that are read at once, of one exact file each, or of several files or in codes, which take up to three times
their size while they are read: the disk is busy while others are summed."""
GLOBAL_ROW_ID_BYTES = 8
"""Of the number of a row, which stands before it in a block."""
LOCAL_ROW_ID_BYTES = 4
"""Of a row that stands among some of a block, counted from the first of the block."""


def rows_per_block(row_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Rows of every block but the last, where a row has `row_bytes` with its id and its states."""
    return 1 << (max(block_bytes // row_bytes, 1).bit_length() - 1)
