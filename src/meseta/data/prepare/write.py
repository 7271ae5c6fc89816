"""Second pass of `meseta prepare`: spooled rows are standardized, counted and written as Parquet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.data.dataset.records import DataFile, Split
from meseta.data.dataset.statistics import WINDOW_SAMPLES, WindowCounter
from meseta.data.dataset.vocabulary import Vocabulary
from meseta.data.prepare.encode import to_list_array
from meseta.data.prepare.spool import Spool
from meseta.data.schema.layout import RawLayout

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
