"""Speed of training while deltas are saved."""

from __future__ import annotations

import argparse
import shutil
import statistics
import time

from record import record
from tiers.save_part import BATCH_SIZE, NUM_FEATURES, PooledTraining

from checkpoints.changing import WIDTH, empty_folder, row_bits
from meseta import EmbeddingBagCollection, FeatureSpec, OptimizerSpec, TableSpec
from meseta.checkpoint import SaveOptions, prune
from meseta.checkpoint.background import BackgroundSaver
from meseta.checkpoint.delta_tracker import DeltaTracker
from meseta.comm import World

KEPT = {"exact": 0.97, "4": 0.94}
"""Required share of the speed of training, by bits."""


def make_training(num_rows: int) -> PooledTraining:
    table = TableSpec(name="table", num_embeddings=num_rows, embedding_dim=WIDTH,
                      optimizer=OptimizerSpec(name="rowwise_adagrad", lr=0.01))  # fmt: skip
    features = [FeatureSpec(name=f"f{number}", table="table") for number in range(NUM_FEATURES)]
    return PooledTraining(EmbeddingBagCollection([table], features, seed=0), num_rows)


def steps_per_s(training: PooledTraining, seconds: float) -> float:
    begin_s, num_steps = time.perf_counter(), 0
    while time.perf_counter() < begin_s + seconds:
        training.step()
        num_steps += 1
    return num_steps / (time.perf_counter() - begin_s)


def measure_training(options: argparse.Namespace) -> bool:
    folder, world = empty_folder(options), World.single()
    training = make_training(int(options.gigabytes * 1e9 / (4 * WIDTH + 4)))
    embeddings = training.embeddings
    changes, background = DeltaTracker(folder, world, "rolling", 8), BackgroundSaver(world)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    steps_per_s(training, options.seconds / 3)
    bits, step = row_bits("table", options.bits), 0
    for turn in range(options.turns + 2):
        for with_delta in (True, False):
            begin_s, pause_s = time.perf_counter(), 0.0
            if with_delta:
                background.wait()
                base, rows = changes.begin_save(step, embeddings.shards, bits)
                step += 1
                background.start(
                    folder, shards=embeddings.shards, rows=rows, options=SaveOptions(base=base, bits=bits),
                    on_saved=lambda _: prune(folder, keep_last=2), step=step, plan=embeddings.plan, state={}, dense={},
                )  # fmt: skip
                pause_s = time.perf_counter() - begin_s
            speed = steps_per_s(training, options.seconds - pause_s) * (options.seconds - pause_s) / options.seconds
            if turn > 1:  # the first save is whole, the first delta takes its memory
                speeds[with_delta].append(speed)
            print(f"  {'with' if with_delta else 'without'} a save: {speed:.2f} steps/s of {BATCH_SIZE:,} samples, "
                  f"held up {pause_s:.3f} s", flush=True)  # fmt: skip
    background.wait()
    kept = statistics.median(a / b for a, b in zip(speeds[True], speeds[False], strict=True))
    print(f"  training keeps {kept:.3f} of its speed (at least {KEPT[options.bits]})")
    medians = [statistics.median(speeds[which]) for which in (True, False)]
    case = f"{options.gigabytes:g} GB, a delta every {options.seconds:g} s, {options.bits}"
    record("deltas", case, "training", medians[0], "steps/s", peer="without saves", peer_value=medians[1])
    shutil.rmtree(folder)
    return kept >= KEPT[options.bits]
