"""Duration of deltas and of loading a chain, compared with full saves and PyTorch."""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.timing import alternate, medians
from record import record

from checkpoints.changing import (
    WIDTH,
    ChangingTable,
    empty_folder,
    forget,
    row_bits,
    save_with_dcp,
    seconds_without_training,
    table_of,
)
from meseta.checkpoint import SaveOptions, load, save, summarize
from meseta.checkpoint.background import copy_shards
from meseta.checkpoint.delta_tracker import DeltaTracker
from meseta.comm import World

SHARE, CHAIN, CODED = 0.2, 8, "4"


class Saves:
    def __init__(self, folder: Path, table: ChangingTable, bits: str = "exact") -> None:
        self.table, self.world, self._bits = table, World.single(), row_bits("table", bits)
        self.folder = folder / ("ours" if bits == "exact" else bits)
        self.step = 0
        self._former: dict[bool, list[Any]] = {True: [], False: []}
        """Memory of the last full save and of the last delta, which the next save reuses."""
        self._changes = DeltaTracker(self.folder, self.world, "consecutive", 1 << 10)

    def save(self, *, whole: bool = False) -> tuple[float, float]:
        """Return (seconds without training, seconds until the save is durable)."""
        gc.collect()
        start_s = time.perf_counter()
        base, rows = self._changes.begin_save(0 if whole else self.step, [self.table.shard])
        self._former[whole] = copies = list(copy_shards([self.table.shard], rows, self._former[whole]))
        held_s = time.perf_counter() - start_s
        self.step += 1
        known: dict[str, Any] = {"step": self.step, "plan": self.table.plan, "dense": {}, "state": {}}
        save(self.folder, world=self.world, shards=copies, options=SaveOptions(base=base, bits=self._bits), **known)
        return held_s, time.perf_counter() - start_s


def measure_times(options: argparse.Namespace) -> bool:
    folder, table = empty_folder(options), table_of(options)
    times: dict[str, list[float]] = {}
    saves = Saves(folder, table)
    saves.save(whole=True)
    for turn in range(options.turns + 1):
        for name, whole in (("whole", True), ("delta", False)):
            table.touch(SHARE)
            held_s, durable_s = saves.save(whole=whole)
            if turn:  # the first takes its memory
                for what, value in (("held up", held_s), ("durable", durable_s)):
                    times.setdefault(f"{name}, {what}", []).append(value)
            print(f"  {name}: held up {held_s:.3f} s, durable after {durable_s:.2f} s", flush=True)
        begin_s = time.perf_counter()
        save_with_dcp(table.tensors, folder / "dcp")
        times.setdefault("dcp, durable", []).append(time.perf_counter() - begin_s)
        times.setdefault("async_save, held up", []).append(seconds_without_training(table.tensors, folder / "async"))
        for name in ("dcp", "async"):
            shutil.rmtree(folder / name)
    seconds = medians(times)
    for name, value in seconds.items():
        print(f"  {name}: {value:.3f}")
    good = load_part(options, folder, table)
    for metric, peer, most in (
        ("delta, durable", "whole, durable", 0.4),
        ("delta, durable", "dcp, durable", 0.2),
        ("delta, held up", "whole, held up", 0.6),
        ("delta, held up", "async_save, held up", 0.25),
    ):
        ratio = seconds[metric] / seconds[peer]
        print(f"  {metric} / {peer}: {ratio:.2f} (at most {most})")
        good &= ratio <= most
        case = f"{options.gigabytes:g} GB, {SHARE:.0%} touched"
        record("deltas", case, metric, seconds[metric], "s", peer=peer, peer_value=seconds[peer])
    shutil.rmtree(folder)
    return good


def load_part(options: argparse.Namespace, folder: Path, table: ChangingTable) -> bool:
    """Measure cold loads. Returns whether a chain is as fast per byte as a full checkpoint, and faster if quantized."""
    shutil.rmtree(folder / "ours")
    _, coded = _chain(folder, table, CODED)
    whole, exact = _chain(folder, table, "exact")
    other = ChangingTable(table.spec.num_embeddings, WIDTH, seed=1)

    def load_cold(path: Path) -> float:
        forget(folder)
        start_s = time.perf_counter()
        load(path, world=World.single(), shards=[other.shard])
        return time.perf_counter() - start_s

    loads = {path: partial(load_cold, path) for path in (whole, coded, exact)}
    seconds = medians(alternate(loads, options.turns))
    assert torch.equal(other.shard.weight, table.shard.weight)
    for path, load_s in seconds.items():
        print(f"  loaded {path.relative_to(folder)} in {load_s:.2f} s")
    per_byte = {path: seconds[path] / summarize(path).num_bytes for path in (whole, exact)}
    cost, share = per_byte[exact] / per_byte[whole], seconds[coded] / seconds[exact]
    print(f"  a byte of a chain of {CHAIN} costs {cost:.2f} of one of a whole checkpoint to load (at most 1.2)")
    print(f"  with {CODED} bits it takes {share:.2f} of its time (at most 0.7), "
          f"{seconds[coded] / seconds[whole]:.2f} of that of a whole checkpoint")  # fmt: skip
    case = f"{options.gigabytes:g} GB, chain of {CHAIN}"
    record("deltas", case, "load", 1e9 * per_byte[exact], "s/GB", peer="whole", peer_value=1e9 * per_byte[whole])
    record("deltas", f"{case}, {CODED} bits", "load", seconds[coded], "s", peer="exact",
           peer_value=seconds[exact])  # fmt: skip
    return cost <= 1.2 and share <= 0.7


def _chain(folder: Path, table: ChangingTable, bits: str) -> tuple[Path, Path]:
    """Save a full checkpoint and a chain of deltas. Returns the path of the last one."""
    saves = Saves(folder, table, bits)
    saves.save(whole=True)
    whole = saves.folder / f"step-{saves.step:09d}"
    for _ in range(CHAIN - 1):
        table.touch(SHARE)
        saves.save()
    return whole, saves.folder / f"step-{saves.step:09d}"
