"""Table larger than memory: commands in a memory control group."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from common.item_run import ROW_BYTES, make_config, make_data
from common.processes import MESETA, can_limit_memory, in_group, memory_group
from record import record

NUM_SAMPLES = 400_000
NEAR_SHARE = 0.25
MADE_S = 5.0
MADE = """
import sys, time
from meseta import EmbeddingBagCollection, FeatureSpec, OptimizerSpec, Plan, TableSpec
from meseta.spec.tiers import StorageOptions
optimizer = OptimizerSpec(name="rowwise_adagrad")
spec = TableSpec(name="item", num_embeddings=int(sys.argv[1]), embedding_dim=64, optimizer=optimizer)
begun_s = time.perf_counter()
made = EmbeddingBagCollection([spec], [FeatureSpec(name="item", table="item")], seed=0)
plan = Plan.from_dict({"tables": {"item": {"sharding": "table_wise", "tier": "disk"}}}, made.tables, 1)
made.place(plan, StorageOptions(dir=sys.argv[2], cache_bytes=int(sys.argv[3])))
print(time.perf_counter() - begun_s)
"""


class DiskUse:
    """Thread that samples the maximum additional disk usage."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ends = folder, threading.Event()
        self._before = shutil.disk_usage(folder).used
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ends.wait(0.2):
            self.most = max(self.most, shutil.disk_usage(self._folder).used - self._before)

    def end(self) -> int:
        self._ends.set()
        return self.most


def most_memory(group: Path) -> int:
    """Return the peak memory of a control group, including its page cache."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def write_config(options: argparse.Namespace, data: Path) -> Path:
    document = make_config(options.folder / "run", data, "disk", int(NEAR_SHARE * (options.limit_mb << 20)), 80)
    document["train"]["log_every_steps"] = 20
    path: Path = options.folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@dataclass(frozen=True)
class Ended:
    good: bool
    most_bytes: int
    printed: str


def run_limited(name: str, arguments: Sequence[object], options: argparse.Namespace) -> Ended:
    with memory_group(options.limit_mb << 20) as group:
        begun_s = time.perf_counter()
        done = subprocess.run(
            in_group(group, arguments), check=False, capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "2"},
        )  # fmt: skip
        seconds, most = time.perf_counter() - begun_s, most_memory(group)
    print(f"  {name}: {'done' if done.returncode == 0 else f'FAILED ({done.returncode})'} in {seconds:.1f} s, "
          f"{most / 1e6:,.0f} MB at most", flush=True)  # fmt: skip
    if done.returncode != 0:
        print("\n".join(f"    {line}" for line in (done.stdout + done.stderr).strip().splitlines()[-6:]))
    return Ended(done.returncode == 0, most, done.stdout)


def measure_large(options: argparse.Namespace) -> bool:
    """Run all commands under the limit. Returns whether they succeed and the table is created in five seconds."""
    options.folder.mkdir(parents=True, exist_ok=True)
    size = options.num_rows * ROW_BYTES
    free, needed = shutil.disk_usage(options.folder).free, int(3.6 * size)
    print(f"{options.num_rows:,} rows, {size / 1e9:.1f} GB, under {options.limit_mb:,} MB")
    if needed > min(free, options.disk_gb * 1e9):
        print(f"it takes {needed / 1e9:.0f} GB of disk; {free / 1e9:.0f} are free, and {options.disk_gb:g} may be used")
        return False
    if not can_limit_memory(options.limit_mb << 20):
        return True
    use = DiskUse(options.folder)
    run = options.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    data = make_data(options.folder, options.num_rows, NUM_SAMPLES)
    config = write_config(options, data)
    meseta, exported = MESETA[1:], options.folder / "exported"
    cache_bytes = int(NEAR_SHARE * (options.limit_mb << 20))
    made = run_limited("made", ["-c", MADE, options.num_rows, options.folder / "rows", cache_bytes], options)
    made_s = float(made.printed) if made.good else float("inf")
    print(f"    made in {made_s:.2f} s")
    steps: list[tuple[str, list[object]]] = [
        ("train, evaluate, save", ["train", config]),
        ("resume", ["train", config, "train.max_steps=120"]),
        ("eval", ["eval", run]),
        ("predict", ["predict", run, "--out", options.folder / "predictions.parquet"]),
        ("checkpoint verify", ["checkpoint", "verify", run]),
        ("checkpoint export", ["checkpoint", "export", run, "--out", exported, "--table", "item"]),
    ]
    ended = {name: run_limited(name, [*meseta, *arguments], options) for name, arguments in steps}
    print(f"  {use.end() / 1e9:.1f} GB of disk at most")
    case = f"{options.num_rows:,} rows of {ROW_BYTES} bytes in {options.limit_mb:,} MB"
    record("tiers", case, "table made", made_s, "s", peer="allowed", peer_value=MADE_S)
    record("tiers", case, "disk at most", use.most / 1e6, "MB", peer="allowed", peer_value=options.disk_gb * 1e3)
    for name, one in ended.items():
        if one.good:
            most_mb, limit_mb = one.most_bytes / 1e6, (options.limit_mb << 20) / 1e6
            record("tiers", case, f"{name}: memory", most_mb, "MB", peer="limit", peer_value=limit_mb)
    for left in (run, data, exported):
        shutil.rmtree(left, ignore_errors=True)
    return all(one.good for one in ended.values()) and made_s < MADE_S and use.most <= options.disk_gb * 1e9
