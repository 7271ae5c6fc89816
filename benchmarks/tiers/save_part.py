"""Saves and loads of a table on disk, compared with the rates of the disk."""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.timing import alternate, medians, seconds
from record import record
from torch import nn

import meseta
from meseta import EmbeddingBagCollection, FeatureSpec, KeyedJaggedTensor, OptimizerSpec, Plan, TableSpec, checkpoint
from meseta.checkpoint.background import BackgroundSaver
from meseta.comm import World
from meseta.measure.synthetic_batches import zipf_ids
from meseta.spec.tiers import StorageOptions

WIDTH, NUM_FEATURES, BATCH_SIZE = 64, 26, 2048
NEAR_SHARE, ALONE_SHARE, BESIDE_SHARE, TRAINING_SHARE = 0.15, 0.6, 0.25, 0.8
WRITTEN_AT_ONCE = 1 << 16
LIMIT_BYTES, REQUEST_BYTES = 1 << 30, 1 << 20
ROW_BYTES = 4 * WIDTH + 4


def disk_limit(folder: Path) -> float:
    """Limit of copying: 1 / (1 / read + 1 / write), with the sequential rates of the disk in bytes per second."""
    path, block = folder / "limit", mmap.mmap(-1, REQUEST_BYTES)
    block.write(os.urandom(REQUEST_BYTES))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        begun_s = time.perf_counter()
        for place in range(0, LIMIT_BYTES, REQUEST_BYTES):
            os.pwrite(descriptor, block, place)
        os.fsync(descriptor)
        written_s = time.perf_counter()
        for place in range(0, LIMIT_BYTES, REQUEST_BYTES):
            os.preadv(descriptor, [block], place)
        read_s = time.perf_counter()
    finally:
        os.close(descriptor)
        path.unlink()
    print(f"  the disk alone: writes {LIMIT_BYTES / (written_s - begun_s) / 1e6:,.0f} MB/s, "
          f"reads {LIMIT_BYTES / (read_s - written_s) / 1e6:,.0f} MB/s", flush=True)  # fmt: skip
    return LIMIT_BYTES / (read_s - begun_s)


def table_on_disk(options: argparse.Namespace) -> EmbeddingBagCollection:
    spec = TableSpec(
        name="item",
        num_embeddings=options.num_rows,
        embedding_dim=WIDTH,
        optimizer=OptimizerSpec(name="rowwise_adagrad"),
    )
    features = [FeatureSpec(name=f"f{number}", table="item") for number in range(NUM_FEATURES)]
    made = EmbeddingBagCollection([spec], features, seed=0)
    cache_rows = int(NEAR_SHARE * options.num_rows)
    entry = {"sharding": "table_wise", "tier": "disk", "cache_rows": cache_rows}
    made.apply_plan(
        Plan.from_dict({"tables": {"item": entry}}, made.tables, 1), StorageOptions(dir=options.folder / "rows")
    )
    return made


def write_scattered(made: EmbeddingBagCollection, num_rows: int) -> None:
    """Write every row once in random order, like evictions of training."""
    shard: Any = made.shards[0]
    records = torch.randint(0, 120, (WRITTEN_AT_ONCE, ROW_BYTES), dtype=torch.uint8)
    for rows in torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).split(WRITTEN_AT_ONCE):
        shard.backing_store.write(rows, records[: len(rows)])
    shard.backing_store.flush()


def alone(made: EmbeddingBagCollection, options: argparse.Namespace) -> dict[str, float]:
    """Return median bytes per second of saves and loads, and the limit of the disk."""
    size, world, path = options.num_rows * ROW_BYTES, World.single(), options.folder / "saved"
    known: dict[str, Any] = {"step": 1, "plan": made.plan, "dense": {}, "state": {}}

    def save() -> float:
        return size / seconds(lambda: checkpoint.save(path, world=world, shards=made.shards, **known))

    def load() -> float:
        shards = table_on_disk(options).shards
        rate = size / seconds(lambda: checkpoint.load(path / "step-000000001", world=world, shards=shards))
        shutil.rmtree(path)
        return rate

    calls = {"limit": partial(disk_limit, options.folder), "save": save, "load": load}
    return medians(alternate(calls, options.passes))


@dataclass
class SparseBatch:
    sparse: Any


class PooledModel(nn.Module):
    def __init__(self, embeddings: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = nn.Sequential(
            nn.Linear(NUM_FEATURES * WIDTH, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, sparse: Any) -> torch.Tensor:
        pooled: torch.Tensor = self.embeddings(sparse).pooled.values
        return self.dense(pooled.reshape(BATCH_SIZE, -1))


def batches(num_rows: int) -> Iterator[SparseBatch]:
    names, random = [f"f{number}" for number in range(NUM_FEATURES)], np.random.default_rng(0)
    lengths = torch.ones(NUM_FEATURES * BATCH_SIZE, dtype=torch.int64)
    drawn = [torch.from_numpy(zipf_ids(random, NUM_FEATURES * BATCH_SIZE, num_rows)) for _ in range(200)]
    while True:
        for ids in drawn:
            yield SparseBatch(KeyedJaggedTensor(names, ids, lengths, None))


class PooledTraining:
    """Training of `PooledModel` on Zipf ids, which fetches rows ahead."""

    def __init__(self, embeddings: EmbeddingBagCollection, num_rows: int) -> None:
        self.embeddings, self._model = embeddings, PooledModel(embeddings)
        self._optimizer = torch.optim.SGD(self._model.dense.parameters(), lr=0.01)
        self._steps = meseta.ahead(batches(num_rows), self._model)

    def step(self) -> None:
        loss = self._model(next(self._steps).sparse).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def close(self) -> None:
        self._steps.close()


def measure_training_and_saves(made: EmbeddingBagCollection, options: argparse.Namespace) -> tuple[float, float, float]:
    """Measure steps per second without and with saves, and the rate of these saves."""
    training = PooledTraining(made, options.num_rows)

    def train(seconds: float, background: BackgroundSaver | None = None) -> tuple[float, float]:
        """Return (steps/s, saves/s)."""
        num_steps = num_saves = 0
        is_saved = threading.Event()
        is_saved.set()
        begun_s = time.perf_counter()
        while (now_s := time.perf_counter()) < begun_s + seconds or (background and num_saves == 0):
            if background is not None and is_saved.is_set():
                num_saves += num_steps > 0
                if now_s >= begun_s + seconds:
                    break
                is_saved.clear()
                # Each save replaces the one before.
                background.start(
                    options.folder / "saved", shards=made.shards, dense={}, on_saved=lambda _: is_saved.set(),
                    step=1, plan=made.plan, state={},
                )  # fmt: skip
            training.step()
            num_steps += 1
        return num_steps / (time.perf_counter() - begun_s), num_saves / (time.perf_counter() - begun_s)

    train(options.seconds)  # Until popular rows are cached.
    without, _ = train(options.seconds)
    background = BackgroundSaver(World.single())
    saving, saves_per_s = train(options.seconds, background)
    background.wait()
    after, _ = train(options.seconds)
    training.close()
    return statistics.mean((without, after)), saving, saves_per_s * options.num_rows * ROW_BYTES


def measure_saves(options: argparse.Namespace) -> bool:
    options.folder.mkdir(parents=True, exist_ok=True)
    made = table_on_disk(options)
    case = f"{options.num_rows:,} rows of {ROW_BYTES} bytes"
    print(f"{case}, {options.num_rows * ROW_BYTES / 1e9:.1f} GB")
    write_scattered(made, options.num_rows)
    limit, save, load = alone(made, options).values()
    print(f"  saves {save / limit:.2f} and loads {load / limit:.2f} of the disk's rate")
    training, saving, rate = measure_training_and_saves(made, options)
    shutil.rmtree(options.folder / "saved", ignore_errors=True)
    print(f"  {training:.1f} steps/s, {saving:.1f} ({saving / training:.2f}) during saves at {rate / 1e6:,.0f} MB/s "
          f"({rate / limit:.2f} of the disk's rate)", flush=True)  # fmt: skip
    peer = "disk, read once and written once"
    for name, value in (("save", save), ("load", load), ("save beside training", rate)):
        record("tiers", case, name, value / 1e6, "MB/s", peer=peer, peer_value=limit / 1e6)
    record("tiers", case, "training beside a save", saving, "steps/s", peer="without", peer_value=training)
    good = min(save, load) >= ALONE_SHARE * limit
    return good and saving >= TRAINING_SHARE * training and rate >= BESIDE_SHARE * limit
