"""Intermediate files of encoded rows between the two passes, and running totals of a split by window."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.queues import RowQueue
from meseta.data.dataset.records import DataFile, Split
from meseta.data.dataset.statistics import WINDOW_SAMPLES, Moments, WindowCounter
from meseta.data.dataset.vocabulary import Vocabulary
from meseta.data.prepare.encode import to_list_array
from meseta.data.schema.layout import RawLayout


def partial_label_counts(known: Mapping[str, int], num_rows: int) -> dict[str, int]:
    """Return the number of samples per label for a split's description, or nothing if all samples have all labels."""
    return dict(known) if any(number < num_rows for number in known.values()) else {}


class SplitTally:
    """Running totals of a split, computed over windows of exactly 65,536 rows. The last window may be shorter.

    Record batches of any size are added in order. They do not affect the totals.
    """

    def __init__(self, path: Path, dense: tuple[str, ...], labels: tuple[str, ...]) -> None:
        """Create empty totals. `path` is a file name in a scratch folder, which also stores the rows of an incomplete
        window."""
        self._path = path
        self._labels = labels
        self._dense = dense
        self._pending = RowQueue()
        self._state_files: list[Path] = []
        self.num_rows = 0
        self.positives = dict.fromkeys(labels, 0.0)
        self.label_counts = dict.fromkeys(labels, 0)
        self.moments = Moments(len(dense))

    @property
    def num_windows(self) -> int:
        return -(-self.num_rows // WINDOW_SAMPLES)

    def describe_split(self, files: Sequence[DataFile]) -> Split:
        """Return the description of a split with these rows and the given files."""
        return Split(
            num_rows=self.num_rows,
            num_positives=next(iter(self.positives.values())),
            positives=self.positives if len(self.positives) > 1 else {},
            known=partial_label_counts(self.label_counts, self.num_rows),
            files=tuple(files),
        )

    def add(self, batch: pa.RecordBatch) -> None:
        self._pending.add(batch)
        while self._pending.num_rows >= WINDOW_SAMPLES:
            self._take(WINDOW_SAMPLES)

    def close(self) -> None:
        """Process the rows of the last, incomplete window."""
        if self._pending.num_rows:
            self._take(self._pending.num_rows)

    def get_state(self) -> dict[str, Any]:
        """Return plain data from which `set_state` of another object resumes. Rows of an incomplete window are saved to
        a file."""
        pending = None
        if self._pending.num_rows:
            path = self._path.with_name(f"{self._path.stem}-{self.num_rows + self._pending.num_rows}.arrow")
            if path not in self._state_files:  # An unchanged split is not written again.
                batches = self._pending.batches
                with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batches[0].schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                self._state_files.append(path)
            pending = path.name
        while len(self._state_files) > 2:  # Only the last two states may still be needed.
            self._state_files.pop(0).unlink(missing_ok=True)
        return {
            "pending": pending,
            "num_rows": self.num_rows,
            "positives": self.positives,
            "known": self.label_counts,
            "moments": self.moments.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.num_rows, self.positives = state["num_rows"], dict(state["positives"])
        self.label_counts = dict(state["known"])
        self.moments.set_state(state["moments"])
        if state["pending"]:
            path = self._path.with_name(state["pending"])
            with pa.OSFile(str(path), "rb") as file:
                self._pending = RowQueue(pa.ipc.open_stream(file).read_all().to_batches())
            self._state_files = [path]

    def _take(self, num_rows: int) -> None:
        window = self._pending.take(num_rows).combine_chunks().to_batches()[0]
        self._process_window(window)
        self.num_rows += num_rows
        for label in self._labels:
            values = window.column(label).drop_null().to_numpy()
            self.positives[label] += float(values.sum(dtype=np.float64))
            self.label_counts[label] += values.size
        self.moments.add([window.column(name).to_numpy() for name in self._dense])

    def _process_window(self, window: pa.RecordBatch) -> None:
        """Process a complete window. Subclasses override it."""


class Spool(SplitTally):
    """Totals of a split that also write its windows to a file, for the second pass."""

    def __init__(self, path: Path, dense: tuple[str, ...], labels: tuple[str, ...]) -> None:
        super().__init__(path, dense, labels)
        self._sink: pa.NativeFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._spans: list[tuple[int, int]] = []

    def close(self) -> None:
        super().close()
        if self._writer is not None and self._sink is not None:
            self._writer.close()
            self._sink.close()

    def windows(self, first: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield windows first..stop-1, each in newly allocated memory."""
        # Memory-mapped pages would count as memory of this process.
        with pa.OSFile(str(self._path), "rb") as file:
            schema = pa.ipc.read_schema(file)
            for start, end in self._spans[first:stop]:
                file.seek(start)
                yield pa.ipc.read_record_batch(pa.py_buffer(file.read(end - start)), schema)

    def get_state(self) -> dict[str, Any]:
        return {"spans": self._spans, **super().get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`, and truncate the file to its windows."""
        super().set_state(state)
        self._spans = [(start, end) for start, end in state["spans"]]
        if self._path.exists():
            os.truncate(self._path, self._spans[-1][1] if self._spans else 0)

    def _process_window(self, window: pa.RecordBatch) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._path), "ab" if self._spans else "wb")
            self._writer = pa.ipc.new_stream(self._sink, window.schema)
            # The first batch is preceded by the schema. Writing an empty batch keeps the schema out of the first
            # window.
            self._writer.write_batch(window.slice(0, 0))
        assert self._sink is not None
        start = self._sink.tell()
        self._writer.write_batch(window)
        self._spans.append((start, self._sink.tell()))


NUM_PART_WINDOWS = 8
"""Maximum number of windows (of 65,536 rows) in a part file."""
ROW_GROUP_ROWS = 32_768
"""Number of rows of a Parquet row group, the unit that readers shuffle."""


@dataclass(frozen=True)
class RowFinalizer:
    """Converts encoded rows to rows of the dataset. Each row is converted independently."""

    layout: RawLayout
    mean: NDArray[np.float64]
    """Mean of each dense column over the training split, in the order of the layout."""
    std: NDArray[np.float64]
    """Standard deviation of each dense column over the training split, in the order of the layout."""
    vocabularies: Mapping[str, Vocabulary]
    """Vocabularies by feature. Hashed and bucketized features have none."""

    def finalize(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Standardize dense columns and replace hashes of vocabulary values by rows."""
        columns: dict[str, pa.Array] = {name: rows.column(name) for name in self.layout.sample_columns}
        for name, mean, std in zip(self.layout.dense, self.mean, self.std, strict=True):
            values = rows.column(name).to_numpy().astype(np.float64)
            columns[name] = pa.array(((values - mean) / std).astype(np.float32))
        for column in self.layout.sparse:
            array = rows.column(column.name)
            if column.name in self.vocabularies:
                values, lengths = flatten_lists(array)
                ids = self.vocabularies[column.name].lookup(values)
                if self.vocabularies[column.name].num_embeddings <= 2**31:
                    ids = ids.astype(np.int32)
                array = to_list_array(pa.array(ids), lengths)
            columns[column.name] = array
            if column.weighted:
                columns[f"{column.name}.weight"] = rows.column(f"{column.name}.weight")
        return pa.RecordBatch.from_pydict(columns)


@dataclass(frozen=True, kw_only=True)
class SplitWriter:
    """Writer of the part files of one split. Several threads write different files at the same time."""

    layout: RawLayout
    spool: Spool
    finalizer: RowFinalizer
    counters: Mapping[str, WindowCounter]
    """Counters of the ids of features. Empty if nothing is counted in this split."""
    out: Path
    name: str
    on_rows: Callable[[int], None]
    """Called with the number of rows of each window after it is written."""
    files: list[DataFile]
    """Finished part files, to which `write` appends."""

    def write(self, pool: ThreadPoolExecutor, on_part: Callable[[], None]) -> Split:
        """Write the remaining part files in order, and call `on_part` after each."""
        (self.out / self.name).mkdir(exist_ok=True)
        if self.counters:
            # Consume the iterator, so that errors are raised here.
            list(pool.map(self._count_part, self.files))
        starts = range(0, self.spool.num_windows, NUM_PART_WINDOWS)
        for file in pool.map(self._write_part, starts[len(self.files) :]):
            self.files.append(file)
            on_part()
        return self.spool.describe_split(self.files)

    def _count_part(self, file: DataFile) -> None:
        # An earlier process wrote the file, so its ids have not been counted.
        table = pq.read_table(self.out / file.path, columns=[column.name for column in self.layout.sparse])
        for first in range(0, table.num_rows, WINDOW_SAMPLES):
            count_window(self.counters, table.slice(first, WINDOW_SAMPLES).to_batches())

    def _write_part(self, first: int) -> DataFile:
        path = f"{self.name}/part-{first // NUM_PART_WINDOWS:05d}.parquet"
        num_rows = 0
        writer: pq.ParquetWriter | None = None
        try:
            for window in self.spool.windows(first, min(first + NUM_PART_WINDOWS, self.spool.num_windows)):
                batch = self.finalizer.finalize(window)
                count_window(self.counters, [batch])
                writer = writer or open_part_writer(self.out / path, batch.schema)
                writer.write_batch(batch, row_group_size=ROW_GROUP_ROWS)
                num_rows += batch.num_rows
                self.on_rows(batch.num_rows)
        finally:
            if writer is not None:
                writer.close()
        return DataFile(path=path, num_rows=num_rows)


def count_window(counters: Mapping[str, WindowCounter], batches: Sequence[pa.RecordBatch]) -> None:
    """Add the finished rows of one window (at most 65,536) to the counters of features."""
    num_rows = sum(batch.num_rows for batch in batches)
    assert num_rows <= WINDOW_SAMPLES
    for name, counter in counters.items():
        ids = [flatten_lists(batch.column(name))[0] for batch in batches]
        counter.add_window(ids[0] if len(ids) == 1 else np.concatenate(ids), num_rows)


def open_part_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a writer for a part file with page checksums and LZ4 compression."""
    return pq.ParquetWriter(path, schema, compression="lz4", write_page_checksum=True)


def flatten_lists(array: pa.Array) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Return (values of all rows, number of values per row). The second is `None` if each row has one value."""
    if not pa.types.is_list(array.type):
        return array.to_numpy(), None
    return array.flatten().to_numpy(), np.diff(array.offsets.to_numpy()).astype(np.int64)
