"""One store in one control group: tiers.store_process KIND FOLDER WIDTH ROWS GROUP. Prints rates as JSON.

Other stores are also read by many processes, which is their maximum. Ours is read by this process only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tiers.system_memory import open_map, write_map

BATCH = 20_000
READERS = 16
"""Number of processes for stores whose reads block."""
SECONDS = 5.0
MADE_AT_ONCE = 1 << 16
Start = Callable[[np.ndarray], Callable[[], object]]
"""Function that starts to read rows. Its result waits for them."""


def chunks(num_rows: int, width: int) -> Iterator[tuple[int, np.ndarray]]:
    records = np.random.default_rng(0).integers(0, 256, (MADE_AT_ONCE, width), np.uint8)
    for first in range(0, num_rows, MADE_AT_ONCE):
        yield first, records[: min(MADE_AT_ONCE, num_rows - first)]


def keys_of(rows: np.ndarray) -> list[bytes]:
    raw = rows.astype(">u8").tobytes()
    return [raw[i : i + 8] for i in range(0, len(raw), 8)]


class MemoryMap:
    reader: ClassVar[dict[str, bool]] = {}

    def __init__(self, folder: Path, num_rows: int, width: int) -> None:
        self.path, self.shape = folder / "map", (num_rows, width)

    def build(self) -> None:
        write_map(self.path, (records for _, records in chunks(*self.shape)))

    def open(self) -> None:
        self.map = open_map(self.path, np.uint8, self.shape)

    def read(self, rows: np.ndarray) -> None:
        assert len(self.map[rows]) == len(rows)

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        self.map[rows] = records


class Lmdb:
    """LMDB with cursors that read many keys."""

    reader: ClassVar[dict[str, bool]] = {"readonly": True}

    def __init__(self, folder: Path, num_rows: int, width: int) -> None:
        self.path, self.num_rows, self.width = str(folder / "lmdb"), num_rows, width

    def open(self, **more: Any) -> None:
        import lmdb

        size = self.num_rows * (self.width + 64) * 3 + (1 << 30)
        self.env = lmdb.open(self.path, map_size=size, readahead=False, sync=False, metasync=False, writemap=True,
                             map_async=True, max_readers=64, **more)  # fmt: skip

    def build(self) -> None:
        self.open()
        for first, records in chunks(self.num_rows, self.width):
            with self.env.begin(write=True) as txn, txn.cursor() as cursor:
                values = map(bytes, records)
                cursor.putmulti(
                    list(zip(keys_of(np.arange(first, first + len(records))), values, strict=True)), append=True
                )
        self.env.sync(True)
        self.env.close()

    def read(self, rows: np.ndarray) -> None:
        with self.env.begin(buffers=True) as txn, txn.cursor() as cursor:
            assert len(cursor.getmulti(keys_of(np.sort(rows)))) > 0

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        with self.env.begin(write=True) as txn, txn.cursor() as cursor:
            order = np.argsort(rows)
            cursor.putmulti(list(zip(keys_of(rows[order]), map(bytes, records[order]), strict=True)))


class RocksDb:
    """RocksDB (rocksdict) with direct reads and batched gets, loaded from sorted files."""

    reader: ClassVar[dict[str, bool]] = {"read_only": True}

    def __init__(self, folder: Path, num_rows: int, width: int) -> None:
        self.path, self.num_rows, self.width = str(folder / "rocks"), num_rows, width
        self.folder = folder

    def options(self) -> Any:
        from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(DBCompressionType.none())
        table = BlockBasedOptions()
        table.set_block_cache(Cache(16 << 20))  # of each reading process
        table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        return options

    def build(self) -> None:
        from rocksdict import Rdict, SstFileWriter

        files, writer, done = [], None, 0
        for first, records in chunks(self.num_rows, self.width):
            if writer is None:
                files.append(str(self.folder / f"{first}.sst"))
                writer = SstFileWriter(options=self.options())
                writer.open(files[-1])
            for key, value in zip(keys_of(np.arange(first, first + len(records))), map(bytes, records), strict=True):
                writer[key] = value
            done += records.nbytes
            if done > 128 << 20:
                writer.finish()
                writer, done = None, 0
        if writer is not None:
            writer.finish()
        database = Rdict(self.path, self.options())
        database.ingest_external_file(files)
        database.close()

    def open(self, read_only: bool = False) -> None:
        from rocksdict import AccessType, Rdict

        access = {"access_type": AccessType.read_only()} if read_only else {}
        self.database = Rdict(self.path, self.options(), **access)

    def read(self, rows: np.ndarray) -> None:
        assert None not in self.database.get(keys_of(np.sort(rows)))

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        from rocksdict import WriteBatch, WriteOptions

        batch = WriteBatch(raw_mode=True)
        for key, value in zip(keys_of(rows), map(bytes, records), strict=True):
            batch.put(key, value)
        options = WriteOptions()
        options.disable_wal = True
        self.database.write(batch, options)


class Ours:
    def __init__(self, folder: Path, num_rows: int, width: int) -> None:
        import torch

        from meseta.ops.row_file import DiskEngine, RowFile

        self.torch = torch
        self.file = RowFile(DiskEngine(folder), "rows", num_rows=num_rows, record_bytes=width)

    def build(self) -> None:
        for first, records in chunks(self.file.num_rows, self.file.record_bytes):
            self.file.write(self.torch.arange(first, first + len(records)), self.torch.from_numpy(records))
        self.file.flush()

    def start(self, rows: np.ndarray) -> Callable[[], object]:
        out = self.torch.empty(len(rows), self.file.record_bytes, dtype=self.torch.uint8)
        return self.file.read(self.torch.from_numpy(rows), out).wait

    def write(self, rows: np.ndarray, records: np.ndarray) -> None:
        self.file.write(self.torch.from_numpy(rows), self.torch.from_numpy(records))


STORE: Any = None


def open_reader(store: Any) -> None:
    global STORE  # noqa: PLW0603
    STORE = store
    store.open(
        **({"read_only": True} if isinstance(store, RocksDb) else {"readonly": True} if isinstance(store, Lmdb) else {})
    )


def read_share(rows: np.ndarray) -> None:
    STORE.read(rows)


def rate(
    start: Callable[[np.ndarray], Callable[[], object]], write: Callable | None, num_rows: int, width: int
) -> float:
    """Return rows per second. With `write`, rows are written back while the next ones are read."""
    generator, done, start_s = np.random.default_rng(1), 0, time.perf_counter()
    records = generator.integers(0, 256, (BATCH, width), np.uint8)
    before: np.ndarray | None = None
    while time.perf_counter() - start_s < SECONDS:
        rows = np.unique(generator.integers(0, num_rows, BATCH))
        generator.shuffle(rows)
        wait = start(rows)
        if write is not None and before is not None:
            write(before, records[: len(before)])
        wait()
        before, done = rows, done + len(rows)
    return done / (time.perf_counter() - start_s)


@contextmanager
def ours(store: Ours) -> Iterator[Start]:
    yield store.start


@contextmanager
def with_processes(store: Any) -> Iterator[Start]:
    with multiprocessing.get_context("fork").Pool(READERS, open_reader, (store,)) as pool:
        store.open()
        yield lambda rows: pool.map_async(read_share, np.array_split(rows, READERS)).get


@contextmanager
def alone(store: Any) -> Iterator[Start]:
    def start(rows: np.ndarray) -> Callable[[], object]:
        store.read(rows)
        return lambda: None

    yield start


def main() -> None:
    kind, folder, group = sys.argv[1], Path(sys.argv[2]), sys.argv[5]
    width, num_rows = map(int, sys.argv[3:5])
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    place = folder / f"{kind}-{os.getpid()}"
    place.mkdir(parents=True)
    try:
        store = {"meseta": Ours, "memmap": MemoryMap, "lmdb": Lmdb, "rocksdb": RocksDb}[kind](place, num_rows, width)
        start_s = time.perf_counter()
        store.build()
        built_s = time.perf_counter() - start_s
        rates: dict[str, float] = {}
        ways = [(f"{READERS} readers", with_processes), ("1 reader", alone)]
        for name, reading in [("1 reader", ours)] if isinstance(store, Ours) else ways:
            with reading(store) as start:
                rates[f"read, {name}"] = rate(start, None, num_rows, width)
                rates[f"read and write back, {name}"] = rate(start, store.write, num_rows, width)
        print(json.dumps(rates | {"seconds to build": built_s}))
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
