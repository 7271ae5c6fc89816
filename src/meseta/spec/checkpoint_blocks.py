"""Sizes and concurrency limits of checkpoint blocks, shared by `meseta.checkpoint` and the memory prediction."""

from __future__ import annotations

BLOCK_BYTES = 32 << 20
"""Maximum size of a block, and of the data that a rank receives, or sends to one other rank, in an exchange round."""
# The disk writes some rounds while others are checksummed.
NUM_PENDING_WRITES = 4
"""Maximum number of concurrent checkpoint writes per rank, each of the blocks of one exchange round."""
# The disk reads some blocks while others are checksummed.
NUM_PARALLEL_READS, NUM_PARALLEL_CHAIN_READS = 6, 3
"""Maximum number of blocks read concurrently. `NUM_PARALLEL_READS` is for unquantized blocks of one file.
`NUM_PARALLEL_CHAIN_READS` is for all others, which need up to three times their size in memory."""
GLOBAL_ROW_ID_BYTES = 8
"""Size of the int64 id that a block stores with each row."""
LOCAL_ROW_ID_BYTES = 4
"""Size of a uint32 row index relative to the block, in files that store only some rows of a block."""


def rows_per_block(row_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the number of rows per block, a power of two. The last block of a table may have fewer.

    `row_bytes` includes the row id and the optimizer state.
    """
    return 1 << (max(block_bytes // row_bytes, 1).bit_length() - 1)
