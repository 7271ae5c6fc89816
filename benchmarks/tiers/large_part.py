"""Table larger than memory: commands in a memory control group."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from common.item_run import ROW_BYTES, make_config, make_data
from common.processes import MESETA, can_limit_memory, in_group, memory_group
from record import record

NUM_SAMPLES = 400_000
NEAR_SHARE = 0.25


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


def run_limited(name: str, arguments: Sequence[object], options: argparse.Namespace) -> int | None:
    """Run a command in a control group. Returns its peak memory in bytes, or `None` if it failed."""
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
        return None
    return most


def measure_large(options: argparse.Namespace) -> bool:
    options.folder.mkdir(parents=True, exist_ok=True)
    size = options.num_rows * ROW_BYTES
    free, needed = shutil.disk_usage(options.folder).free, int(3.6 * size)
    print(f"{options.num_rows:,} rows, {size / 1e9:.1f} GB, under {options.limit_mb:,} MB")
    if needed > min(free, options.disk_gb * 1e9):
        print(f"it takes {needed / 1e9:.0f} GB of disk; {free / 1e9:.0f} are free, and {options.disk_gb:g} may be used")
        return False
    if not can_limit_memory(options.limit_mb << 20):
        return True
    run = options.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    data = make_data(options.folder, options.num_rows, NUM_SAMPLES)
    config = write_config(options, data)
    meseta, exported = MESETA[1:], options.folder / "exported"
    steps: list[tuple[str, list[object]]] = [
        ("train, evaluate, save", ["train", config]),
        ("resume", ["train", config, "train.max_steps=120"]),
        ("eval", ["eval", run]),
        ("predict", ["predict", run, "--out", options.folder / "predictions.parquet"]),
        ("checkpoint verify", ["checkpoint", "verify", run]),
        ("checkpoint export", ["checkpoint", "export", run, "--out", exported, "--table", "item"]),
    ]
    ended = {name: run_limited(name, [*meseta, *arguments], options) for name, arguments in steps}
    case = f"{options.num_rows:,} rows of {ROW_BYTES} bytes in {options.limit_mb:,} MB"
    for name, most_bytes in ended.items():
        if most_bytes:
            limit_mb = (options.limit_mb << 20) / 1e6
            record("tiers", case, f"{name}: memory", most_bytes / 1e6, "MB", peer="limit", peer_value=limit_mb)
    for left in (run, data, exported):
        shutil.rmtree(left, ignore_errors=True)
    return all(ended.values())
