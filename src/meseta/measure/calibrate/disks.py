"""What rows on a disk cost here, by the engine that trains from it: reads at random and in sequence, writes, and the
processor time of a row that is brought near."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from meseta.errors import MesetaError
from meseta.measure.threads import threads
from meseta.ops.row_file import DiskEngine, RowFile
from meseta.spec import OptimizerSpec, Shard, TableSpec
from meseta.spec.cost_model import TierCost
from meseta.spec.tiers import DISK, StorageOptions
from meseta.storage import ROW, Lease, TableStorage, make_storages

FILE_BYTES = 1 << 30
"""Of rows, where the disk has eight times as much free; else an eighth of that."""
RECORD_BYTES, COLUMNS = 256, 64
ROWS_AT_ONCE = 1 << 16
READS_AT_ONCE = 1 << 14
NUM_PASSES, PASS_S = 3, 0.5
"""Of random reads: so many passes of at least so many seconds, whose median counts."""
NUM_NEAR, NUM_IDS = 1 << 15, 1 << 12
"""Rows of a shard that lie near, and ids of a batch, where processor time is measured."""
NUM_BATCHES = 20
_LEAST_S = 1e-9


def measure_disk(
    folder: Path, tiers: TierCost, num_threads: int, source: str, max_reads_per_s: float | None = None
) -> TierCost:
    """`tiers` with what rows in `folder` cost a rank of so many threads.

    The file is read as it was just written; the host of a virtual machine may hold it, which looks like a faster disk
    than it is later. Raises MesetaError where the folder cannot be written or has no room.
    """
    engine = DiskEngine(folder, max_reads_per_s=max_reads_per_s)
    num_bytes = min(FILE_BYTES, shutil.disk_usage(engine.folder).free // 8)
    num_rows = num_bytes // RECORD_BYTES // ROWS_AT_ONCE * ROWS_AT_ONCE
    if num_rows == 0:
        raise MesetaError(
            f"calibrate: the disk of {str(folder)!r} has too little room to measure; name a folder with "
            f"{8 * ROWS_AT_ONCE * RECORD_BYTES:,} bytes free"
        )
    with threads(num_threads):
        rows = RowFile(engine, "calibration", num_rows=num_rows, record_bytes=RECORD_BYTES)
        try:
            write_bytes_per_s = _write_all(rows)
            read_bytes_per_s = _read_in_sequence(rows)
            reads_per_s = float(np.median([_read_at_random(rows, seed) for seed in range(NUM_PASSES)]))
        finally:
            rows.close()
        shard_s, id_s, row_s = _processor_seconds(folder, num_threads)
    return replace(
        tiers,
        near_shard_s=shard_s,
        near_id_s=id_s,
        disk_bytes_per_s=read_bytes_per_s,
        disk_write_bytes_per_s=write_bytes_per_s,
        disk_row_s=1.0 / reads_per_s,
        disk_processor_s=row_s,
        measured=True,
        source=source,
    )


def _write_all(rows: RowFile) -> float:
    """Bytes a second, in sequence."""
    records = torch.randint(0, 256, (ROWS_AT_ONCE, RECORD_BYTES), dtype=torch.uint8)
    start = time.perf_counter()
    for first in range(0, rows.num_rows, ROWS_AT_ONCE):
        rows.write(torch.arange(first, first + ROWS_AT_ONCE), records)
    rows.flush()
    return rows.num_rows * RECORD_BYTES / (time.perf_counter() - start)


def _read_in_sequence(rows: RowFile) -> float:
    """Bytes a second: the next rows are asked for while the last ones come."""
    frozen, records = rows.freeze(), [torch.empty(ROWS_AT_ONCE, RECORD_BYTES, dtype=torch.uint8) for _ in range(2)]
    start = time.perf_counter()
    reading = frozen.read(0, records[0])
    for number in range(1, rows.num_rows // ROWS_AT_ONCE):
        coming = frozen.read(number * ROWS_AT_ONCE, records[number % 2])
        reading.wait()
        reading = coming
    reading.wait()
    seconds = time.perf_counter() - start
    frozen.close()
    return rows.num_rows * RECORD_BYTES / seconds


def _read_at_random(rows: RowFile, seed: int) -> float:
    """Reads a second, with as many in flight as the engine takes."""
    random, done = np.random.default_rng(seed), 0
    records = torch.empty(READS_AT_ONCE, RECORD_BYTES, dtype=torch.uint8)
    before, start = rows.counters.reads, time.perf_counter()
    while (seconds := time.perf_counter() - start) < PASS_S or done == 0:
        asked = torch.from_numpy(random.integers(0, rows.num_rows, READS_AT_ONCE))
        rows.read(asked, records).wait()
        done = rows.counters.reads - before
    return done / seconds


def _processor_seconds(folder: Path, num_threads: int) -> tuple[float, float, float]:
    """Of a rank: to look for the ids of a batch in one shard, of each id on top, and of a row that is brought from the
    disk and pushes another one out."""
    num_rows = 32 * NUM_NEAR
    spec = TableSpec(
        name="calibration", num_embeddings=num_rows, embedding_dim=COLUMNS, optimizer=OptimizerSpec(name="sgd")
    )
    place = {"rows": (0, num_rows), "columns": (0, COLUMNS), "ranks": (0,), "tier": DISK, "near_rows": NUM_NEAR}
    shard = Shard(table=spec.name, **place)  # type: ignore[arg-type]
    [storage] = make_storages([(spec, shard)], seed=0, device="cpu", options=StorageOptions(dir=folder))
    values = np.zeros((ROWS_AT_ONCE, COLUMNS), np.float32)
    for first in range(0, num_rows, ROWS_AT_ONCE):
        storage.write(first, {ROW: values})
    near = torch.arange(NUM_NEAR)
    _spent(storage, [near])
    few, many = (
        _spent(storage, [near[torch.randint(0, NUM_NEAR, (count,))] for _ in range(NUM_BATCHES)])[0]
        for count in (NUM_IDS // 16, NUM_IDS)
    )
    id_s = max((many - few) / (NUM_IDS - NUM_IDS // 16), 0.0)
    shard_s = max(few - id_s * (NUM_IDS // 16), 0.0)
    batches = list(torch.randperm(num_rows - NUM_NEAR)[: NUM_BATCHES * NUM_IDS].add(NUM_NEAR).split(NUM_IDS))
    _, spent = _spent(storage, batches)
    row_s = max(spent / num_threads - shard_s - id_s * NUM_IDS, _LEAST_S) / NUM_IDS
    return shard_s, id_s, row_s


def _spent(storage: TableStorage, batches: list[torch.Tensor]) -> tuple[float, float]:
    """Median seconds, and mean processor seconds of all threads, of a batch whose rows are lent and given back."""
    seconds, processor = [], time.process_time()
    for ids in batches:
        start = time.perf_counter()
        lease = Lease([storage], [(0, ids)])
        lease.wait()
        lease.end()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), (time.process_time() - processor) / len(batches)
