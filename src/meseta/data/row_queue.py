"""Rows that come in parts of any size and go in others."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa


class RowQueue:
    """Record batches of one schema, in order; what is taken shares their memory."""

    def __init__(self, batches: Sequence[pa.RecordBatch] = ()) -> None:
        self.batches = list(batches)
        """What was added and not taken."""
        self.num_rows = sum(batch.num_rows for batch in self.batches)
        """Of them."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Put rows behind the others."""
        self.batches.append(batch)
        self.num_rows += batch.num_rows

    def take(self, num_rows: int) -> pa.Table:
        """Remove the first rows, of which there are at least so many."""
        table = pa.Table.from_batches(self.batches)
        self.batches = [batch for batch in table.slice(num_rows).to_batches() if batch.num_rows]
        self.num_rows -= num_rows
        return table.slice(0, num_rows)
