"""Predictions as a Parquet file, written by rank 0 while they are made."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meseta.comm import World
from meseta.data.reader import Reader
from meseta.pipeline.step import Model
from meseta.spec import MesetaError
from meseta.train.evaluate import gather_rows, predict

SCHEMA = pa.schema([("row", pa.int64()), ("prediction", pa.float32()), ("label", pa.float32())])


def write_predictions(model: Model, reader: Reader, world: World, out: Path) -> int:
    """Write (row, prediction, label) for every row of the reader's split, in order; returns the number of rows.

    The file appears whole or not at all. Raises MesetaError, on all ranks, where it cannot be written.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    writer, problem = None, None
    if world.rank == 0:
        try:
            writer = pq.ParquetWriter(temporary, SCHEMA)
        except OSError as error:
            problem = MesetaError(f"predictions {str(out)!r} cannot be written: {error.strerror or error}")
    world.raise_together(problem)
    num_rows = 0
    for own_logits, own_labels in predict(model, reader, world):
        scores = gather_rows(own_logits.astype(np.float64), world)
        labels = gather_rows(own_labels, world)
        if writer is not None:
            rows = np.arange(num_rows, num_rows + len(scores))
            columns = [rows, (1 / (1 + np.exp(-scores))).astype(np.float32), labels]
            writer.write_table(pa.table(columns, schema=SCHEMA))
        num_rows += len(scores)
    if writer is not None:
        writer.close()
        os.replace(temporary, out)
    return num_rows
