"""Predictions as a Parquet file, written by rank 0 while they are made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from meseta.comm import World
from meseta.data.reader import Reader
from meseta.pipeline.step import Model
from meseta.spec import MesetaError
from meseta.train.evaluate import gather_rows, predict

SCHEMA = pa.schema([("row", pa.int64()), ("prediction", pa.float32()), ("label", pa.float32())])


def write_predictions(model: Model, reader: Reader, world: World, out: Path) -> int:
    """Write (row, prediction, label) for every row of the reader's split, in order; returns the number of rows.

    The file appears whole or not at all. Raises MesetaError, on all ranks, where it cannot be written, and for a
    prediction that is not finite.
    """
    file = _File(out) if world.rank == 0 else None
    num_rows = 0
    for own_logits, batch in predict(model, reader, world):
        scores = gather_rows(own_logits.astype(np.float64), world)
        labels = gather_rows(batch.label.numpy(), world)
        if file is not None:
            file.add(num_rows, scores, labels)
        num_rows += len(scores)
    world.raise_together(file.finish() if file is not None else None)
    return num_rows


class _File:
    """A growing Parquet file under a temporary name; keeps the first problem for the end, where all ranks meet."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._temporary = out.with_name(f".{out.name}.tmp")
        self._problem: MesetaError | None = None
        self._writer: pq.ParquetWriter | None = None
        with self._noting_problems():
            self._writer = pq.ParquetWriter(self._temporary, SCHEMA)

    def add(self, first_row: int, scores: NDArray[np.float64], labels: NDArray[Any]) -> None:
        """Write the rows of one global batch, whose logits are `scores` [B]."""
        if self._problem is not None or self._writer is None:
            return
        if not np.isfinite(scores).all():
            bad = first_row + int(np.flatnonzero(~np.isfinite(scores))[0])
            self._problem = MesetaError(
                f"predictions: that of row {bad} is not finite; look for broken values in its dense features"
            )
            return
        rows = np.arange(first_row, first_row + len(scores))
        with self._noting_problems():
            self._writer.write_table(pa.table([rows, _sigmoid(scores).astype(np.float32), labels], schema=SCHEMA))

    def finish(self) -> MesetaError | None:
        """Give the file its name, or delete it where something went wrong; returns what that was."""
        with self._noting_problems():
            if self._writer is not None:
                self._writer.close()
            if self._problem is None:
                os.replace(self._temporary, self._out)
        if self._problem is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
        return self._problem

    @contextlib.contextmanager
    def _noting_problems(self) -> Any:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            self._problem = MesetaError(f"predictions {str(self._out)!r} cannot be written: {reason}; choose another")


def _sigmoid(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-score)) without overflow for any finite score."""
    small = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1.0, small) / (1.0 + small)
