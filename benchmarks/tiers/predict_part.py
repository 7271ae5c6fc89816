"""Predicted misses and steps of random tasks in several tiers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from record import record

from meseta import EmbeddingBagCollection, FeatureSpec, KeyedJaggedTensor, OptimizerSpec, Plan, TableSpec, ahead
from meseta.data.dataset.statistics import WINDOW_SAMPLES, FeatureStatistics
from meseta.measure.calibrate.disks import measure_disk
from meseta.planner import documented_cost_model, predict
from meseta.planner.cost.memory import RunBytes
from meseta.spec import FeatureLoad, Topology, Workload
from meseta.spec.tiers import OFFLOADED_TIERS, StorageOptions, Tier
from meseta.storage import TieredShard
from tiers.save_part import SparseBatch

Ids = NDArray[np.int64]
MISSES_WITHIN, STEP_WITHIN = 0.2, 0.25
WARM = 0.6
"""Warm-up steps relative to those that fill the cache."""
TURNS, STEPS = 6, 10


class RandomTask:
    """Tables of random sizes with ids of power laws."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        count = int(self.random.integers(3, 7))
        self.batch_size = int(self.random.choice([1024, 2048, 4096]))
        self.pooling = [int(n) for n in self.random.choice([1, 1, 2, 4], count)]
        rows = [int(10 ** self.random.uniform(4.3, 5.3)) for _ in range(count)]
        optimizer = OptimizerSpec(name=str(self.random.choice(["sgd", "rowwise_adagrad", "adam"])))
        self.tables = tuple(
            TableSpec(
                name=f"t{n}",
                num_embeddings=size,
                embedding_dim=int(self.random.choice([16, 32, 64])),
                optimizer=optimizer,
            )
            for n, size in enumerate(rows)
        )
        self.features = tuple(FeatureSpec(name=table.name, table=table.name) for table in self.tables)
        self._ends = [self._law(size) for size in rows]
        self._rows = [self.random.permutation(size) for size in rows]
        tiers: Sequence[Tier] = [*OFFLOADED_TIERS, *self.random.choice(["hbm", *OFFLOADED_TIERS], count - 2)]
        self.places: dict[str, dict[str, Any]] = {}
        for table, tier in zip(self.tables, tiers, strict=True):
            place: dict[str, Any] = {"sharding": "table_wise", "tier": str(tier)}
            if tier in OFFLOADED_TIERS:
                place["cache_rows"] = int(self.random.choice([0.1, 0.2, 0.4]) * table.num_embeddings)
            self.places[table.name] = place

    def _law(self, num_rows: int) -> NDArray[np.float64]:
        """Return cumulative probabilities."""
        weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -self.random.uniform(0.8, 1.2)
        return np.cumsum(weights / weights.sum())

    def ids(self, table: int, num_samples: int) -> Ids:
        uniform = self.random.random(num_samples * self.pooling[table])
        ranks = np.minimum(np.searchsorted(self._ends[table], uniform), len(self._rows[table]) - 1)
        return self._rows[table][ranks]

    def batch(self) -> SparseBatch:
        values = [self.ids(table, self.batch_size) for table in range(len(self.tables))]
        lengths = np.repeat(np.array(self.pooling), self.batch_size)
        names = [feature.name for feature in self.features]
        return SparseBatch(
            KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(values)), torch.from_numpy(lengths))
        )

    def workload(self) -> Workload:
        """Return the workload as `meseta prepare` would count it."""
        loads = {}
        for table, feature in enumerate(self.features):
            counted = FeatureStatistics(self.tables[table].num_embeddings)
            counted.add_window(self.ids(table, WINDOW_SAMPLES), WINDOW_SAMPLES)
            loads[feature.name] = FeatureLoad(pooling_factor=self.pooling[table], reuse=counted.result().reuse)
        return Workload(tables=self.tables, features=self.features, batch_size=self.batch_size, loads=loads)

    def plan(self, *, resident: bool = False) -> Plan:
        places = {name: {"sharding": "table_wise"} for name in self.places} if resident else self.places
        return Plan.from_dict({"tables": places}, self.tables, 1)

    def fits(self) -> bool:
        """Whether the rows of two batches fit into the cache."""
        for table, place in enumerate(self.places.values()):
            near = place.get("cache_rows")
            if near is not None and near < 1.2 * len(np.unique(self.ids(table, 2 * self.batch_size))):
                return False
        return True


class TrainedTask:
    """Tables of a task whose rows have all been written."""

    def __init__(self, task: RandomTask, plan: Plan, options: StorageOptions) -> None:
        self.made = EmbeddingBagCollection(task.tables, task.features, seed=1)
        self.made.apply_plan(plan, options)
        self.tiered_shards = [shard for shard in self.made.shards if isinstance(shard, TieredShard)]
        for shard in self.tiered_shards:
            rows = shard.read(0, shard.shard.num_rows)
            shard.write(0, {name: value.numpy() for name, value in rows.items()})
        self._task = task
        self._batches: list[SparseBatch] = []
        self._flights = ahead(iter(self._batches.pop, None), self.made)
        self.seconds: list[float] = []
        self.num_missed = 0
        """Number of rows that were not cached."""

    def warm(self, num_steps: int) -> None:
        self.turn(num_steps)
        self.seconds, self.num_missed = [], 0

    def turn(self, num_steps: int) -> None:
        self._batches += [self._task.batch() for _ in range(num_steps + self.made.lookahead + 1 - len(self._batches))]
        before, start_s = self._misses(), time.perf_counter()
        for flight in islice(self._flights, num_steps):
            self.made(flight.sparse).pooled.values.square().mean().backward()
            self.seconds.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
        self.num_missed += self._misses() - before

    def _misses(self) -> int:
        return sum(shard.cache.counters.num_misses for shard in self.tiered_shards)


def measure_steps(task: RandomTask, plans: Sequence[Plan], options: StorageOptions) -> list[tuple[float, float]]:
    """Return (seconds, misses) of a step for each plan."""
    trained = [TrainedTask(task, plan, options) for plan in plans]
    for one, plan in zip(trained, plans, strict=True):
        one.warm(warm_steps(task, plan))
    for _ in range(TURNS):
        for one in trained:
            one.turn(STEPS)
    return [(float(np.median(one.seconds)), one.num_missed / len(one.seconds)) for one in trained]


def warm_steps(task: RandomTask, plan: Plan) -> int:
    """Return the number of steps that approximately fill the cache."""
    near = [entry.shards[0].cache_rows or 0 for entry in plan.tables]
    ids = [task.batch_size * pooling for pooling in task.pooling]
    return int(min(max(WARM * 12 * count / of_batch for count, of_batch in zip(near, ids, strict=True)) + 20, 800))


def measure_predictions(options: argparse.Namespace) -> bool:
    threads = torch.get_num_threads()
    model = replace(documented_cost_model("cpu"), num_threads=threads)
    model = replace(model, tiers=measure_disk(options.folder, model.tiers, threads, "measured before"))
    good, seed, done = True, options.seed, 0
    errors: dict[str, list[float]] = {"misses": [], "step": []}
    while done < options.num_tasks:
        task, seed = RandomTask(seed), seed + 1
        if not task.fits():
            continue
        done += 1
        plan, storage = task.plan(), StorageOptions(dir=options.folder)
        workload, run = task.workload(), RunBytes(storage=storage)
        prediction = predict(plan, workload, Topology(), model, run=run)
        beside = replace(
            model, tiers=replace(model.tiers, disk_row_s=0.0, disk_write_bytes_per_s=1e30, disk_bytes_per_s=1e30)
        )
        busy, bare = (predict(one, workload, Topology(), beside, run=run) for one in (plan, task.plan(resident=True)))
        (resident_s, _), (step_s, missed) = measure_steps(task, [task.plan(resident=True), plan], storage)
        # Only the part of a step that tiers add is predicted. The rest is measured with resident tables.
        predicted_s = max(resident_s + busy.step_s - bare.step_s, float(prediction.disk_s[0]))
        predicted_misses = sum(prediction.cache_misses.values())
        errors["misses"].append(predicted_misses / missed - 1.0)
        errors["step"].append(predicted_s / step_s - 1.0)
        print(
            f"task {seed - 1}: misses {predicted_misses:,.0f} predicted, {missed:,.0f} measured; step, ms: "
            f"{1e3 * predicted_s:.2f} predicted, of the disk {1e3 * prediction.disk_s[0]:.2f}, "
            f"{1e3 * step_s:.2f} measured, {1e3 * resident_s:.2f} resident",
            flush=True,
        )
    for name, limit in (("misses", MISSES_WITHIN), ("step", STEP_WITHIN)):
        worst = max(map(abs, errors[name]))
        good &= worst <= limit
        case = f"{options.num_tasks} random tasks of mixed tiers, from seed {options.seed}"
        record("tiers", case, f"predicted {name}", 100 * worst, "% off at worst", peer="limit", peer_value=100 * limit)
    return good
