"""Table whose rows change between saves, with Zipf ids, and saves of PyTorch."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import Tensor

from meseta import Plan, TableSpec
from meseta.config.row_bits import RowBits
from meseta.measure.synthetic_batches import zipf_ids
from meseta.optim import make_row_optimizer
from meseta.storage import TableShard

DRAWN_AT_ONCE = 1 << 17
WIDTH = 64


def row_bits(table: str, bits: str) -> dict[str, RowBits]:
    return {} if bits == "exact" else {table: cast(RowBits, int(bits))}


class ChangingTable:
    """Table with row-wise Adagrad and change marks."""

    def __init__(self, num_rows: int, width: int, seed: int = 0) -> None:
        self.spec = TableSpec(name="table", num_embeddings=num_rows, embedding_dim=width)
        self.plan = Plan.from_dict({"tables": {"table": "table_wise"}}, [self.spec], 1)
        optimizer = make_row_optimizer(self.spec.optimizer)
        weight = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * 0.05
        [shard] = self.plan["table"].shards
        self.shard = TableShard(self.spec, shard, weight, optimizer.init(weight), optimizer)
        self._random = np.random.default_rng(seed)

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes()

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"row": self.shard.weight, **self.shard.state}

    def touch(self, share: float) -> int:
        """Change rows with Zipf ids until `share` of all has changed. Returns their number."""
        num_rows = self.spec.num_embeddings
        touched: NDArray[np.bool_] = np.zeros(num_rows, bool)
        while (count := int(touched.sum())) < share * num_rows:
            touched[zipf_ids(self._random, DRAWN_AT_ONCE, num_rows)] = True
        rows = torch.from_numpy(touched.nonzero()[0])
        change = torch.from_numpy(self._random.standard_normal(self.spec.embedding_dim, np.float32)) * 1e-3
        self.shard.weight[rows] += change
        for state in self.shard.state.values():
            state[rows] += 1e-6
        self.shard.marks.add(rows)
        return count


def table_of(options: argparse.Namespace) -> ChangingTable:
    """Create a table of `--gigabytes`."""
    return ChangingTable(int(options.gigabytes * 1e9 / (4 * WIDTH + 4)), WIDTH)


def empty_folder(options: argparse.Namespace) -> Path:
    folder: Path = options.folder / "saved"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def forget(folder: Path) -> None:
    """Remove files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save_with_dcp(tensors: dict[str, Tensor], path: Path) -> None:
    """Save with two threads, which is fastest here. The writer syncs its files."""
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def seconds_without_training(tensors: dict[str, Tensor], path: Path) -> float:
    """Save with `async_save`, and return the seconds until training continues."""
    start_s = time.perf_counter()
    saved: Any = dcp.async_save(tensors, checkpoint_id=path)
    pause_s = time.perf_counter() - start_s
    saved.result()
    return pause_s
