"""The row optimizers, one function (spec -> RowOptimizer) each.

Every product is rounded before it is added: a fused multiply-add in one place only (the tail of a vector loop, another
shard's column) would cost the contract's equal bits.
"""
