"""Batches of new raw rows, encoded on the fly without temporary files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.queues import PrefetchIterator, RowQueue
from meseta.data.prepare.new_rows import NewRows
from meseta.data.read.batch import Batch
from meseta.data.read.rows import decode_rows
from meseta.data.read.slicing import rank_range
from meseta.data.read.tensors import to_batch


class NewBatches:
    """Batches of new rows for one rank, in the order of the files. They equal those of a Reader of the prepared rows.

    Each rank encodes all rows and takes its slice of each global batch. The rows can be read once.
    """

    def __init__(
        self,
        rows: NewRows,
        dataset: Dataset,
        batch_size: int,
        *,
        prefetch_batches: int = 4,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Create the batches. `dataset` is the description of the rows with the labels to return. `batch_size` is over
        all ranks."""
        self.dataset = dataset
        self.rows = rows
        self._batch_size = batch_size
        self._prefetch_batches = prefetch_batches
        self._rank, self._num_ranks = rank, num_ranks
        self._keys: deque[pa.Table] = deque()

    def epoch(self) -> PrefetchIterator[Batch]:
        """Return this rank's slice of each global batch. Iteration raises the errors of `NewRows.read`."""
        return PrefetchIterator(self._batches(), self._prefetch_batches)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the tables that `take` returns."""
        return self.rows.key_schema

    def take(self, num_rows: int) -> pa.Table:
        """Return the key columns of the next global batch, already returned, which must have `num_rows` rows."""
        if not self.schema.names:
            return pa.table({})
        keys = self._keys.popleft()
        assert keys.num_rows == num_rows
        return keys

    def _batches(self) -> Iterator[Batch]:
        for table, keys in self._global_batches():
            if keys is not None:
                self._keys.append(keys)
            start, stop = rank_range(self._rank, self._num_ranks, 0, table.num_rows)
            yield to_batch(self.dataset, decode_rows(self.dataset, [table]).take(slice(start, stop)))

    def _global_batches(self) -> Iterator[tuple[pa.Table, pa.Table | None]]:
        waiting, keys = RowQueue(), RowQueue()

        def front(num_rows: int) -> tuple[pa.Table, pa.Table | None]:
            return waiting.take(num_rows), keys.take(num_rows) if keys.batches else None

        with closing(self.rows.read()) as blocks:
            for block in blocks:
                waiting.add(block.batch)
                if block.keys is not None:
                    keys.add(block.keys)
                while waiting.num_rows >= self._batch_size:
                    yield front(self._batch_size)
        if waiting.num_rows:
            yield front(waiting.num_rows)
