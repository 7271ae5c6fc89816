"""Row optimizers. Each is a function that creates a `RowOptimizer` from an `OptimizerSpec`."""
# Every product is rounded before it is added. A fused multiply-add in some places only, such as the tail of a vector
# loop or the column of another shard, would change bits.
