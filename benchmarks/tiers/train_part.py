"""Training with tables on disk, compared with tables in memory."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from peers.e2e_meseta import make_batch, make_model, make_pipeline
from peers.workloads import E2E_WORKLOADS
from record import record

from meseta import Plan
from meseta.comm import World
from meseta.data import Batch
from meseta.measure.synthetic_batches import DlrmWorkload, TrainingBatch, make_id_batches
from meseta.pipeline.pipeline import StepResult
from meseta.spec import InitSpec
from meseta.spec.tiers import StorageOptions
from meseta.storage import Lease, TieredShard
from meseta.telemetry.row_traffic import RowTraffic

SHARES = {"d16_2k": 0.2, "d64_2k": 0.15}
"""Cached share of rows and states. It is a fifth for other workloads."""
KEPT, WAITED = 0.85, 0.05
"""Required share of the speed in memory, unless steps wait for rows longer than this share."""
WARM_IDS = 3_000_000
"""Number of samples that fill the cache before the measurement."""
WARM_STEPS = 20
OPTIMIZER = "rowwise_adagrad"


def storage_options(folder: Path, training: DlrmWorkload) -> StorageOptions:
    row_bytes = 4 * training.dim + 4
    return StorageOptions(dir=folder, cache_bytes=int(share_of(training) * row_bytes * sum(training.lookups.rows)))


def lr_of(training: DlrmWorkload) -> float:
    return 0.05 if training.lookups.bag_size == 1 else 0.001


def share_of(training: DlrmWorkload) -> float:
    return SHARES.get(training.name, 0.2)


@dataclass(frozen=True)
class Turn:
    seconds: float
    traffic: RowTraffic


class Trained:
    """Model that trains on new batches."""

    def __init__(self, training: DlrmWorkload, storage: StorageOptions | None, seed: int) -> None:
        """Create the model. With `storage`, all tables use its disk."""
        self.training, self._seed = training, seed
        model = make_model(training, OPTIMIZER, "float32", lr_of(training), InitSpec(kind="uniform", scale=0.01))
        entries = {f"t{f}": {"sharding": "table_wise", "tier": "disk"} for f in range(len(training.lookups.rows))}
        plan = Plan.from_dict({"tables": entries}, model.embeddings.tables, 1) if storage else None
        self.pipeline = make_pipeline(model, lr_of(training), World.single(), plan, storage)
        self.embeddings = self.pipeline.model.embeddings
        self.tiered_shards = [shard for shard in self.embeddings.shards if isinstance(shard, TieredShard)]
        self._batches: list[Batch] = []
        self._steps: Iterator[StepResult] = self.pipeline.steps(iter(self._batches.pop, None))

    def prepare(self, num_steps: int) -> None:
        self._seed += 1
        random = np.random.default_rng(self._seed)
        traffic = self.training.lookups
        made = []
        for ids in make_id_batches(traffic, num_steps + self.embeddings.lookahead - len(self._batches), self._seed):
            dense = random.standard_normal((traffic.batch_size, self.training.num_dense), dtype=np.float32)
            label = (random.random(traffic.batch_size) < 0.25).astype(np.float32)
            shape = len(traffic.rows), traffic.batch_size, traffic.bag_size
            made.append(make_batch(TrainingBatch(dense=dense, ids=ids.ids.reshape(shape), label=label)))
        self._batches += made

    def turn(self, num_steps: int) -> Turn:
        self.prepare(num_steps)
        before, start_s = self._traffic(), time.perf_counter()
        for _ in islice(self._steps, num_steps):
            pass
        seconds = (time.perf_counter() - start_s) / num_steps
        return Turn(seconds, (self._traffic() - before).scaled(1 / num_steps))

    def _traffic(self) -> RowTraffic:
        return sum(self.embeddings.row_traffic.values(), RowTraffic())

    def write_all(self) -> None:
        row_bytes = 4 * self.training.dim + 4
        print(f"{self.training.name}: writing {row_bytes * sum(self.training.lookups.rows) / 1e9:.1f} GB", flush=True)
        for shard in self.tiered_shards:
            for first in range(0, shard.shard.num_rows, 1 << 18):
                stop = min(first + (1 << 18), shard.shard.num_rows)
                shard.write(first, {name: value.numpy() for name, value in shard.read(first, stop).items()})

    def fill(self, num_samples: int) -> None:
        """Request the rows of samples, so that the cache holds popular rows."""
        size = self.training.lookups.batch_size
        num_batches = num_samples // size
        for first in range(0, num_batches, 50):
            for ids in make_id_batches(self.training.lookups, min(50, num_batches - first), 1_000_000 + first // 50):
                each = torch.from_numpy(ids.ids).view(len(self.tiered_shards), -1)
                lease = Lease(self.embeddings.shards, list(enumerate(each)))
                lease.wait()
                lease.release()

    def cache_bytes(self) -> int:
        """Return the memory of rows: cache, states, marks, index and buffers."""
        engines = {shard.backing_store.engine for shard in self.tiered_shards}
        near = sum(shard.cache.num_slots * shard.num_bytes() // shard.shard.num_rows for shard in self.tiered_shards)
        beside = sum(
            shard.cache.num_bytes() + 8 * shard.cache.num_slots + shard.backing_store.num_bytes()
            for shard in self.tiered_shards
        )
        return near + beside + sum(engine.num_bytes() for engine in engines)


def measure_training(options: argparse.Namespace) -> bool:
    options.folder.mkdir(parents=True, exist_ok=True)
    good = True
    for training in (training for training in E2E_WORKLOADS if training.name in options.trainings.split(",")):
        good &= _measure(training, options)
    return good


def _measure(training: DlrmWorkload, options: argparse.Namespace) -> bool:
    limit = options.max_reads_per_s
    share = share_of(training)
    resident = Trained(training, None, seed=10)
    tiered = Trained(training, storage_options(options.folder, training), seed=10)
    tiered.write_all()
    tiered.fill(options.num_warm)
    for engine in {shard.backing_store.engine for shard in tiered.tiered_shards} if limit else ():
        engine.max_reads_per_s = limit
    for one in (resident, tiered):
        one.turn(min(WARM_STEPS, options.num_steps))
    turns: dict[str, list[Turn]] = {"resident": [], "tiered": []}
    for _ in range(options.num_turns):
        for name, one in (("resident", resident), ("tiered", tiered)):
            turns[name].append(one.turn(options.num_steps))
    seconds = {name: statistics.median(turn.seconds for turn in values) for name, values in turns.items()}
    misses = statistics.median(turn.traffic.num_misses for turn in turns["tiered"])
    written = statistics.median(turn.traffic.written_bytes for turn in turns["tiered"])
    waited = statistics.median(turn.traffic.wait_s / turn.seconds for turn in turns["tiered"])
    kept = seconds["resident"] / seconds["tiered"]
    batch_size = training.lookups.batch_size
    print(
        f"{training.name}: {batch_size / seconds['tiered']:,.0f} samples/s with {100 * share:.0f} % near "
        f"({tiered.cache_bytes() / 1e6:,.0f} MB in all), {batch_size / seconds['resident']:,.0f} resident: {kept:.2f}; "
        f"{misses:,.0f} misses a step; {100 * waited:.1f} % of it waited for rows; {written / 1e6:,.1f} MB written",
        flush=True,
    )
    case = f"{training.name}, {100 * share:.0f} % near" + (f", {limit:,.0f} reads/s" if limit else "")
    record("tiers", case, "training", batch_size / seconds["tiered"], "samples/s", peer="in memory",
           peer_value=batch_size / seconds["resident"])  # fmt: skip
    return kept >= KEPT or waited > WAITED
