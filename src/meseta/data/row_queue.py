"""Queue of rows that are added and taken in different amounts."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa


class RowQueue:
    """Queue of rows in record batches with the same schema. Taken rows share the memory of the added batches."""

    def __init__(self, batches: Sequence[pa.RecordBatch] = ()) -> None:
        self.batches = list(batches)
        """Record batches in the queue."""
        self.num_rows = sum(batch.num_rows for batch in self.batches)
        """Number of rows in the queue."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        self.batches.append(batch)
        self.num_rows += batch.num_rows

    def take(self, num_rows: int) -> pa.Table:
        """Remove and return the first `num_rows` rows. The queue must have this many rows."""
        table = pa.Table.from_batches(self.batches)
        self.batches = [batch for batch in table.slice(num_rows).to_batches() if batch.num_rows]
        self.num_rows -= num_rows
        return table.slice(0, num_rows)
