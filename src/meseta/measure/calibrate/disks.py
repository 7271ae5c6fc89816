"""Calibration of tier `disk` on this machine, with the disk engine that training uses."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from meseta.errors import MesetaError
from meseta.measure.calibrate.row_cache import measure_row_cache
from meseta.measure.threads import use_num_threads
from meseta.ops.row_file import DiskEngine, RowFile
from meseta.spec.cost_model import TierCost

MAX_FILE_BYTES = 1 << 30
RECORD_BYTES = 256
ROWS_PER_CHUNK = 1 << 16
READS_PER_BATCH = 1 << 14
NUM_RANDOM_READ_ROUNDS, RANDOM_READ_WINDOW_S = 3, 0.5


def measure_disk(
    folder: Path, tiers: TierCost, num_threads: int, source: str, max_reads_per_s: float | None = None
) -> TierCost:
    """Return `tiers` with measured constants for row files in `folder` and for the row cache.

    The engine limits random reads to `max_reads_per_s`. In a virtual machine, the host may cache the file that was just
    written, so that the disk appears faster than it is.

    Raises MesetaError if the folder is not writable or its disk is too full.
    """
    engine = DiskEngine(folder, max_reads_per_s=max_reads_per_s)
    num_bytes = min(MAX_FILE_BYTES, shutil.disk_usage(engine.folder).free // 8)
    num_rows = num_bytes // RECORD_BYTES // ROWS_PER_CHUNK * ROWS_PER_CHUNK
    if num_rows == 0:
        raise MesetaError(
            f"calibrate: the disk of {str(folder)!r} has too little free space for a measurement; choose a folder with "
            f"at least {8 * ROWS_PER_CHUNK * RECORD_BYTES:,} bytes free"
        )
    with use_num_threads(num_threads):
        rows = RowFile(engine, "calibration", num_rows=num_rows, record_bytes=RECORD_BYTES)
        try:
            write_bytes_per_s = _write_sequentially(rows)
            read_bytes_per_s = _read_sequentially(rows)
            reads_per_s = float(np.median([_read_randomly(rows, seed) for seed in range(NUM_RANDOM_READ_ROUNDS)]))
        finally:
            rows.close()
    return replace(
        measure_row_cache(tiers, num_threads, folder),
        disk_bytes_per_s=read_bytes_per_s,
        disk_write_bytes_per_s=write_bytes_per_s,
        disk_row_s=1.0 / reads_per_s,
        measured=True,
        source=source,
    )


def _write_sequentially(rows: RowFile) -> float:
    # Write all rows in order. Returns the bytes per second, including the final flush.
    records = torch.randint(0, 256, (ROWS_PER_CHUNK, RECORD_BYTES), dtype=torch.uint8)
    start = time.perf_counter()
    for first in range(0, rows.num_rows, ROWS_PER_CHUNK):
        rows.write(torch.arange(first, first + ROWS_PER_CHUNK), records)
    rows.flush()
    return rows.num_rows * RECORD_BYTES / (time.perf_counter() - start)


def _read_sequentially(rows: RowFile) -> float:
    # Read all rows in order with one chunk of read-ahead. Returns the bytes per second.
    frozen, records = rows.snapshot(), [torch.empty(ROWS_PER_CHUNK, RECORD_BYTES, dtype=torch.uint8) for _ in range(2)]
    start = time.perf_counter()
    reading = frozen.read(0, records[0])
    for number in range(1, rows.num_rows // ROWS_PER_CHUNK):
        # Request the next chunk before waiting for the current one.
        coming = frozen.read(number * ROWS_PER_CHUNK, records[number % 2])
        reading.wait()
        reading = coming
    reading.wait()
    seconds = time.perf_counter() - start
    frozen.close()
    return rows.num_rows * RECORD_BYTES / seconds


def _read_randomly(rows: RowFile, seed: int) -> float:
    # Read random rows with as many reads in flight as the engine allows. Returns the reads per second.
    random, done = np.random.default_rng(seed), 0
    records = torch.empty(READS_PER_BATCH, RECORD_BYTES, dtype=torch.uint8)
    before, start = rows.counters.num_reads, time.perf_counter()
    while (seconds := time.perf_counter() - start) < RANDOM_READ_WINDOW_S or done == 0:
        asked = torch.from_numpy(random.integers(0, rows.num_rows, READS_PER_BATCH))
        rows.read(asked, records).wait()
        done = rows.counters.num_reads - before
    return done / seconds
