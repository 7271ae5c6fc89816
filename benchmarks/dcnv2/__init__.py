"""DLRM-DCNv2 at the shapes of MLPerf Training: its sizes, batches, and the bytes and operations of a step."""
