"""Training with tables on disk, compared with plain PyTorch on memory-mapped files with equal memory."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace

from common.processes import can_limit_memory, memory_group, run_module
from peers.workloads import E2E_WORKLOADS
from record import record

from meseta.measure.synthetic_batches import DlrmWorkload
from tiers.mapped_process import MappedOptions
from tiers.train_part import WARM_STEPS, Trained, lr_of, share_of, storage_options

LEAST, WARM_S = 3.0, 40.0


def measure_mapped(options: argparse.Namespace) -> bool:
    options.folder.mkdir(parents=True, exist_ok=True)
    if not can_limit_memory(1 << 30):
        return True
    good = True
    for training in (training for training in E2E_WORKLOADS if training.name in options.trainings.split(",")):
        good &= _measure(training, options)
    return good


def _measure(training: DlrmWorkload, options: argparse.Namespace) -> bool:
    cache_bytes, ours = _measure_ours(training, options)
    one_row = replace(training, lookups=replace(training.lookups, rows=(1,) * len(training.lookups.rows)))
    beside, _ = _measure_theirs(one_row, options, None)  # memory of the process without rows
    limit = beside + cache_bytes
    _, peer_rate = _measure_theirs(training, options, limit)
    print(
        f"{training.name}: {ours:,.0f} samples/s with {cache_bytes / 1e6:,.0f} MB of rows in memory; plain PyTorch on "
        f"mapped files, in {limit / 1e6:,.0f} MB with the process, {peer_rate:,.0f}: x {ours / peer_rate:.1f}",
        flush=True,
    )
    case = f"{training.name}, {100 * share_of(training):.0f} % near"
    peer = "plain PyTorch, mapped tables, as much memory"
    record("tiers", case, "training", ours, "samples/s", peer=peer, peer_value=peer_rate)
    return ours >= LEAST * peer_rate


def _measure_ours(training: DlrmWorkload, options: argparse.Namespace) -> tuple[int, float]:
    tiered = Trained(training, storage_options(options.folder, training), seed=10)
    tiered.write_all()
    tiered.fill(options.num_warm)
    tiered.turn(WARM_STEPS)
    step_s = statistics.median(tiered.turn(options.num_steps).seconds for _ in range(options.num_turns))
    return tiered.cache_bytes(), training.lookups.batch_size / step_s


def _measure_theirs(training: DlrmWorkload, options: argparse.Namespace, limit: int | None) -> tuple[int, float]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options_of_process = MappedOptions(training, folder, None, options.num_steps, lr_of(training), 0.0)
        if limit is None:
            return _run(options_of_process)
        with memory_group(limit) as group:
            return _run(replace(options_of_process, group=str(group), warm_s=WARM_S))


def _run(options: MappedOptions) -> tuple[int, float]:
    done = run_module("tiers.mapped_process", [options.to_json()])
    if done.returncode != 0:
        raise RuntimeError(f"plain PyTorch failed with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return int(figures["peak_bytes"]), options.training.lookups.batch_size / figures["step_s"]
