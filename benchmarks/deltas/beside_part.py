"""Speed of training while deltas are saved."""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from record import record
from tiers.save_part import BATCH_SIZE, NUM_FEATURES, WIDTH, PooledModel, batches

import meseta
from deltas.changing import row_bits
from meseta import EmbeddingBagCollection, FeatureSpec, OptimizerSpec, TableSpec
from meseta.checkpoint import SaveOptions, prune
from meseta.checkpoint.background import BackgroundSaver
from meseta.checkpoint.delta_tracker import DeltaTracker
from meseta.comm import World

KEPT = {"exact": 0.97, "4": 0.94}
"""Required share of the speed of training, by bits."""


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        num_rows = int(options.gigabytes * 1e9 / (4 * WIDTH + 4))
        table = TableSpec(name="table", num_embeddings=num_rows, embedding_dim=WIDTH,
                          optimizer=OptimizerSpec(name="rowwise_adagrad", lr=0.01))  # fmt: skip
        features = [FeatureSpec(name=f"f{number}", table="table") for number in range(NUM_FEATURES)]
        made = EmbeddingBagCollection([table], features, seed=0)
        self.embeddings: Any = made
        self.model = PooledModel(self.embeddings)
        self._optimizer = torch.optim.SGD(self.model.dense.parameters(), lr=0.01)
        self._steps: Iterator[Any] = meseta.ahead(batches(num_rows), self.model)

    def window(self, seconds: float) -> float:
        """Return steps per second."""
        begun_s, num_steps = time.perf_counter(), 0
        while time.perf_counter() < begun_s + seconds:
            loss = self.model(next(self._steps).sparse).square().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            num_steps += 1
        return num_steps / (time.perf_counter() - begun_s)


def measure_beside(options: argparse.Namespace) -> bool:
    """Measure training with and without saves. Returns whether the requirement is met."""
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    training, world = Training(options), World.single()
    shards = training.embeddings.shards
    changes, background = DeltaTracker(options.folder, world, "rolling", 8), BackgroundSaver(world)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    training.window(options.seconds / 3)
    bits, step = row_bits("table", options.bits), 0
    for turn in range(options.turns + 2):
        for with_delta in (True, False):
            begun_s, held_s = time.perf_counter(), 0.0
            if with_delta:
                background.wait()
                base, rows = changes.begin_save(step, shards, bits)
                step += 1
                known: dict[str, Any] = {"step": step, "plan": training.embeddings.plan, "state": {}, "dense": {}}
                background.start(
                    options.folder, shards=shards, rows=rows, options=SaveOptions(base=base, bits=bits),
                    on_saved=lambda _: prune(options.folder, keep_last=2), **known,
                )  # fmt: skip
                held_s = time.perf_counter() - begun_s
            speed = training.window(options.seconds - held_s) * (options.seconds - held_s) / options.seconds
            if turn > 1:  # the first save is whole, the first delta takes its memory
                speeds[with_delta].append(speed)
            print(f"  {'with' if with_delta else 'without'} a save: {speed:.2f} steps/s of {BATCH_SIZE:,} samples, "
                  f"held up {held_s:.3f} s", flush=True)  # fmt: skip
    background.wait()
    kept = statistics.median(a / b for a, b in zip(speeds[True], speeds[False], strict=True))
    print(f"  training keeps {kept:.3f} of its speed (at least {KEPT[options.bits]})")
    medians = [statistics.median(speeds[which]) for which in (True, False)]
    case = f"{options.gigabytes:g} GB, a delta every {options.seconds:g} s, {options.bits}"
    record("deltas", case, "training", medians[0], "steps/s", peer="without saves", peer_value=medians[1])
    shutil.rmtree(options.folder)
    return kept >= KEPT[options.bits]
