"""Encoded rows between the two passes: an Arrow file per split, cut into windows of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from meseta.data.statistics import WINDOW_SAMPLES, Moments


class Spool:
    """Takes record batches of any size, in order, and writes windows of exactly 65,536 rows (the last may be shorter).

    So everything computed per window depends on the rows alone, not on how the sources were cut into blocks.
    """

    def __init__(self, path: Path, dense: tuple[str, ...]) -> None:
        self._path = path
        self._dense = dense
        self._pending: list[pa.RecordBatch] = []
        self._num_pending = 0
        self._sink: pa.NativeFile | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self.num_rows = 0
        self.num_positives = 0.0
        self.moments = Moments(len(dense))

    @property
    def num_windows(self) -> int:
        return -(-self.num_rows // WINDOW_SAMPLES)

    def add(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        while self._num_pending >= WINDOW_SAMPLES:
            self._write(WINDOW_SAMPLES)

    def close(self) -> None:
        """Write what is left."""
        if self._num_pending:
            self._write(self._num_pending)
        if self._writer is not None and self._sink is not None:
            self._writer.close()
            self._sink.close()

    def windows(self, first: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Windows first..stop-1, read into fresh memory one by one: a mapped file would count as ours."""
        with pa.OSFile(str(self._path), "rb") as file:
            reader = pa.ipc.open_file(file)
            for index in range(first, stop):
                yield reader.get_batch(index)

    def _write(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._pending)
        window = table.slice(0, num_rows).combine_chunks().to_batches()[0]
        self._pending = table.slice(num_rows).to_batches()
        self._num_pending -= num_rows
        if self._writer is None:
            self._sink = pa.OSFile(str(self._path), "wb")
            self._writer = pa.ipc.new_file(self._sink, window.schema)
        self._writer.write_batch(window)
        self.num_rows += num_rows
        self.num_positives += float(window.column("label").to_numpy().sum(dtype=np.float64))
        self.moments.add([window.column(name).to_numpy() for name in self._dense])
