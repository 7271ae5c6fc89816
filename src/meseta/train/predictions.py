"""Predictions as a CSV or Parquet file, which rank 0 writes while all ranks predict."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.comm import World
from meseta.data.dataset.statistics import UnseenValues
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.key_columns import KeyColumns
from meseta.data.read.new_batches import NewBatches
from meseta.data.read.options import ReaderOptions
from meseta.pipeline.losses import Model
from meseta.spec import MesetaError
from meseta.system.files import move, sync
from meseta.train.evaluate import LogitShift, gather_windows, predict
from meseta.train.interop.output_tables import LABEL, PREDICTION, ROW, CsvWriter, OutputColumns, open_table_writer
from meseta.train.metrics import MetricWindow, TaskWindows
from meseta.train.metrics.samples import logistic

_ALL_COLUMNS = OutputColumns()


def write_predictions(
    model: Model,
    reader: BatchReader | NewBatches,
    world: World,
    out: Path,
    keys: Sequence[str] = (),
    logit_shift: LogitShift = 0.0,
    windows: TaskWindows[MetricWindow] | None = None,
    columns: OutputColumns = _ALL_COLUMNS,
) -> int:
    """Write one line per row of the reader's split, in order. Return the number of rows.

    The columns are "row" (int64), `keys`, group and time of the dataset, "prediction" and "label" (float32). Group,
    time and label are omitted if the dataset has none. With several labels, "prediction.NAME" and "label.NAME" replace
    the last two. A missing label is null, or an empty field. The file appears only when it is complete. All ranks
    predict, and rank 0 holds one global batch at a time.
    Raises MesetaError, on all ranks, if a column is unknown, the file cannot be written, or a prediction is not finite.

    Args:
        model: Trained model.
        reader: Reader of the split, or of raw rows.
        world: Ranks of the run.
        out: File to write.
        keys: Dataset columns to copy. Raw rows have the keys that they were opened with instead.
        logit_shift: Correction of the logits.
        windows: Windows that also receive this rank's predictions, if the rows have labels.
        columns: Selection, order and names of columns. `keys` must include `columns.keys`. Group and time are omitted
            unless they are selected.
    """
    file = _PredictionFile(out, reader, keys, columns) if world.rank == 0 else None
    world.raise_on_all_ranks(file.error if file is not None else None)
    num_rows = 0
    try:
        for logits, batch in predict(model, reader, world, logit_shift):
            more = (batch.weight, batch.group, batch.label_mask)
            weight, group, label_mask = (None if column is None else column.numpy() for column in more)
            label = batch.label.numpy()
            if windows is not None and reader.dataset.has_labels:
                windows.add(logits, label, weight, group, label_mask=label_mask)
            shown = label if label_mask is None else np.where(label_mask, label, np.float32(np.nan))
            local_part = logits.astype(np.float64), shown, file is not None and file.error is not None
            parts = world.all_gather_object(local_part)
            if parts[0][2]:  # Rank 0 cannot write any more.
                break
            scores, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            if file is not None:
                file.add(num_rows, scores, labels)
            num_rows += len(scores)
    except BaseException:  # Including KeyboardInterrupt.
        if file is not None:
            file.discard()
        raise
    world.raise_on_all_ranks(file.finish() if file is not None else None)
    return num_rows


@dataclass(frozen=True, kw_only=True)
class PredictionSummary:
    """Result of predicting raw rows."""

    num_rows: int
    unseen: UnseenValues
    metrics: dict[str, dict[str, Any]]
    """Metrics by label as plain data. Empty if the rows have no labels."""
    note: str | None
    """Reason why there are no metrics although there are labels."""


def write_raw_predictions(
    model: Model,
    batches: NewBatches,
    world: World,
    out: Path,
    logit_shift: LogitShift = 0.0,
    columns: OutputColumns = _ALL_COLUMNS,
) -> PredictionSummary:
    """Write predictions of raw rows, see `write_predictions`. Return a summary that is equal on all ranks."""
    windows = TaskWindows(batches.dataset.labels, MetricWindow)
    num_rows = write_predictions(model, batches, world, out, logit_shift=logit_shift, windows=windows, columns=columns)
    metrics, note = {}, None
    if batches.dataset.has_labels:
        merged = gather_windows(windows, world)
        try:
            metrics = {label: merged[label].compute().to_dict() for label in merged.tasks}
        except MesetaError as error:  # Metrics are undefined for labels between 0 and 1.
            note = f"no metrics: {error}"
    return PredictionSummary(num_rows=num_rows, unseen=batches.rows.unseen, metrics=metrics, note=note)


class _PredictionFile:
    """File that is written under a temporary name. It stores the first error until all ranks are synchronized."""

    def __init__(
        self, out: Path, reader: BatchReader | NewBatches, keys: Sequence[str], columns: OutputColumns
    ) -> None:
        self.error: MesetaError | None = None
        self._out = out
        self._temporary_path = out.with_name(f".{out.name}.tmp")
        self._writer: pq.ParquetWriter | CsvWriter | None = None
        labels = reader.dataset.labels
        self._has_labels = reader.dataset.has_labels
        kinds = (PREDICTION, LABEL) if self._has_labels else (PREDICTION,)
        self._value_columns = [(f"{kind}.{name}" if len(labels) > 1 else kind) for kind in kinds for name in labels]
        with self._record_errors():
            self._keys = _open_key_columns(reader, keys, (ROW, *self._value_columns), with_roles=not columns.pairs)
            value_fields = [pa.field(name, pa.float32()) for name in self._value_columns]
            self._schema = pa.schema([pa.field(ROW, pa.int64()), *self._keys.schema, *value_fields])
            columns.check(self._schema.names)
            self._output_columns = columns.pairs or tuple((name, name) for name in self._schema.names)
            written = pa.schema([self._schema.field(old).with_name(new) for new, old in self._output_columns])
            self._writer = open_table_writer(self._temporary_path, out.suffix, written)
        if self.error is not None:
            self.discard()

    def add(self, first_row: int, scores: NDArray[np.float64], labels: NDArray[Any]) -> None:
        """Write the rows of one global batch with logits `scores` [B] or [B, T]."""
        if self.error is not None or self._writer is None:
            return
        num_rows = len(scores)
        scores, labels = scores.reshape(num_rows, -1), labels.reshape(num_rows, -1)
        bad = ~np.isfinite(scores).all(axis=1)
        if bad.any():
            self.error = MesetaError(
                f"predictions: row {first_row + int(np.flatnonzero(bad)[0])} has a logit that is not finite; look for "
                "invalid values in its dense features"
            )
            return
        with self._record_errors():
            keys = self._keys.take(num_rows)
            values = [*logistic(scores).astype(np.float32).T, *(labels.T if self._has_labels else ())]
            rows = np.arange(first_row, first_row + num_rows)
            # A missing label is NaN in `labels` and null in the file.
            arrays = [pa.array(np.ascontiguousarray(one), from_pandas=True) for one in values]
            table = pa.table([pa.array(rows), *keys.columns, *arrays], schema=self._schema)
            news, olds = zip(*self._output_columns, strict=True)
            self._writer.write_table(table.select(olds).rename_columns(news))

    def finish(self) -> MesetaError | None:
        """Rename the file to its final name, or delete it after an error. Return the error, if there is one."""
        with self._record_errors():
            if self._writer is not None:
                self._writer.close()
            if self.error is None:
                sync(self._temporary_path)
                move(self._temporary_path, self._out)
        if self.error is not None:
            self.discard()
        return self.error

    def discard(self) -> None:
        """Close and delete the temporary file."""
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(OSError):
            self._temporary_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _record_errors(self) -> Iterator[None]:
        try:
            yield
        except MesetaError as error:
            self.error = error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            self.error = MesetaError(f"predictions {str(self._out)!r} cannot be written: {reason}; choose another file")


def _open_key_columns(
    reader: BatchReader | NewBatches, keys: Sequence[str], taken: Sequence[str], *, with_roles: bool
) -> KeyColumns | NewBatches:
    """Open the columns to copy, one global batch at a time, besides the columns `taken`. `with_roles` adds the group
    and time of a prepared dataset."""
    if isinstance(reader, BatchReader):
        _check_reader_options(reader.options)
        dataset = reader.dataset
        roles = [name for name in (dataset.group, dataset.time) if name is not None and with_roles]
        return KeyColumns(dataset, reader.split, _key_names([*keys, *roles], taken))
    for name in reader.schema.names:
        _check_not_reserved(name, taken)
    return reader


def _check_not_reserved(name: str, taken: Sequence[str]) -> None:
    if name in taken:
        raise MesetaError(f"keys: {name!r} is also a column of predictions; rename it in the data")


def _check_reader_options(options: ReaderOptions) -> None:
    if options.shuffle or options.filter is not None or options.negative_keep < 1 or options.last_batch != "keep":
        raise MesetaError(
            "predictions: the reader must return every row once, in the order of the files, so that keys match their "
            "rows; remove shuffle, filter, negative_keep and last_batch"
        )


def _key_names(keys: Sequence[str], taken: Sequence[str]) -> list[str]:
    names = [name for name in dict.fromkeys(keys) if name != LABEL or name not in taken]
    for name in names:
        _check_not_reserved(name, taken)
    return names
