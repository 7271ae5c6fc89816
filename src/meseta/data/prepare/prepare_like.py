"""`meseta prepare --like`: make a dataset from raw rows with the encoding of an earlier dataset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import DatasetEncoding
from meseta.data.dataset.queues import RowQueue
from meseta.data.dataset.records import DataFile, Split
from meseta.data.dataset.statistics import WINDOW_SAMPLES, UnseenValues
from meseta.data.prepare.copy_tables import copy_tables
from meseta.data.prepare.new_rows import NewRows, NewRowsProgress
from meseta.data.prepare.sources import find_teacher
from meseta.data.prepare.staging import source_entries, staged_folder
from meseta.data.prepare.write import NUM_PART_WINDOWS, ROW_GROUP_ROWS, open_part_writer, partial_label_counts
from meseta.system.remote import check_not_url

TARGET_SPLIT = "test"
"""Split that receives all rows."""


@dataclass(frozen=True, kw_only=True)
class PrepareLikeOptions:
    """Options of `prepare_like`."""

    sources: Sequence[str]
    """Files, folders, URLs or patterns. They must have the form of the earlier sources, but CSV may replace Parquet and
    vice versa."""
    out: Path
    like: Path
    """Folder of a dataset, or of a run, which keeps the encoding of its dataset."""
    bad_rows: str = "error"
    max_bad_rows: int | float = 0.01
    encoding: str | None = None
    """Encoding of the text. `None` means that of the earlier files."""
    force: bool = False
    """Whether `out` is replaced if it is a prepared dataset."""
    num_threads: int | None = None
    """Number of worker threads, which does not affect the result. `None` means the number of
    `meseta doctor`."""


def prepare_like(options: PrepareLikeOptions, progress: NewRowsProgress | None = None) -> tuple[Dataset, UnseenValues]:
    """Write the dataset directory `options.out` with all rows in the test split, and return (description, unseen
    values).

    Rows are in the order of the files. The dataset has no labels if the files have none. The folder appears with one
    rename after everything is written, and nothing remains after an error or an interrupt. Raises MesetaError as
    `NewRows` does, or if `out` exists.
    """
    check_not_url("prepare: --out", options.out)
    earlier = Dataset.load(options.like)
    max_bad_rows = options.max_bad_rows if options.bad_rows == "skip" else None
    rows = NewRows(earlier, options.sources, max_bad_rows=max_bad_rows, encoding=options.encoding)
    encoding = sha256(DatasetEncoding.from_dataset(earlier).model_dump_json().encode()).hexdigest()
    chosen = {"like": encoding, "bad_rows": options.bad_rows, "max_bad_rows": options.max_bad_rows}
    chosen |= {} if options.encoding is None else {"encoding": options.encoding}
    record = {"options": chosen, "sources": source_entries(rows.sources)}
    with staged_folder(options.out, record, force=options.force) as staging:
        if not staging.is_complete:
            (staging.folder / TARGET_SPLIT).mkdir()
            labels = rows.dataset.label_columns
            writer = _PartFileWriter(staging.folder, labels)
            num_unlabelled = 0
            try:
                with closing(rows.read(progress, options.num_threads)) as parts:
                    for part in parts:
                        # Rows without any of several labels are left out, as in `prepare`.
                        labelled = _drop_unlabeled(part.batch, labels)
                        num_unlabelled += part.batch.num_rows - labelled.num_rows
                        writer.add(labelled)
                split = writer.finish()
            finally:
                writer.close()
            described = copy_tables(rows.dataset, staging.folder)
            teacher = find_teacher(rows.sources) if described.has_labels else None
            counts = {"splits": {TARGET_SPLIT: split}, "teacher": teacher, "num_unlabelled": num_unlabelled}
            described.model_copy(update=counts).save(staging.folder)
    return Dataset.load(options.out), rows.unseen


def _drop_unlabeled(batch: pa.RecordBatch, labels: Sequence[str]) -> pa.RecordBatch:
    if not any(batch[name].null_count for name in labels):
        return batch
    return batch.filter(pa.array(np.any([batch[name].is_valid() for name in labels], axis=0)))


class _PartFileWriter:
    """Writer of the part files of a split. A file has at most 16 row groups of 32,768 rows."""

    def __init__(self, out: Path, labels: Sequence[str]) -> None:
        self._out = out
        self._positives, self._label_counts = dict.fromkeys(labels, 0.0), dict.fromkeys(labels, 0)
        self._unwritten = RowQueue()
        self._writer: pq.ParquetWriter | None = None
        self._files: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        self._unwritten.add(batch)
        while self._unwritten.num_rows >= ROW_GROUP_ROWS:
            self._write(ROW_GROUP_ROWS)

    def finish(self) -> Split:
        if self._unwritten.num_rows:
            self._write(self._unwritten.num_rows)
        self.close()
        num_rows = sum(file.num_rows for file in self._files)
        return Split(
            num_rows=num_rows,
            num_positives=next(iter(self._positives.values()), 0.0),
            positives=self._positives if len(self._positives) > 1 else {},
            known=partial_label_counts(self._label_counts, num_rows),
            files=tuple(self._files),
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, num_rows: int) -> None:
        group = self._unwritten.take(num_rows)
        if self._writer is None:
            path = f"{TARGET_SPLIT}/part-{len(self._files):05d}.parquet"
            self._writer = open_part_writer(self._out / path, group.schema)
            self._files.append(DataFile(path=path, num_rows=0))
        self._writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
        for label in self._positives:
            values = group[label].drop_null().to_numpy()
            self._positives[label] += float(values.sum(dtype=np.float64))
            self._label_counts[label] += values.size
        rows_of_part = self._files[-1].num_rows + num_rows
        self._files[-1] = self._files[-1].model_copy(update={"num_rows": rows_of_part})
        # The files have the same size as those of `prepare`.
        if rows_of_part == NUM_PART_WINDOWS * WINDOW_SAMPLES:
            self.close()
