"""Row files compared with other stores on disk, each in a memory control group."""

from __future__ import annotations

import argparse
import importlib.util
import json

from common.processes import can_limit_memory, memory_group, run_module
from record import record

OURS = "meseta"
STORES = {OURS: None, "memmap": None, "lmdb": "lmdb", "rocksdb": "rocksdict"}
"""Stores, and their packages."""


def measure_store(kind: str, width: int, options: argparse.Namespace) -> dict[str, float]:
    """Return rows per second by 'read' and 'read and write back'."""
    num_rows = int(options.gigabytes * 1e9 / width)
    with memory_group(options.limit_mb << 20) as group:
        arguments = [kind, str(options.folder), str(width), str(num_rows), str(group)]
        done = run_module("tiers.store_process", arguments, {"OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            print(f"  {kind} failed: {done.stderr.strip().splitlines()[-1:]}")
            return {}
        rates: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"  {kind}: " + ", ".join(f"{name} {rate:,.0f} rows/s" for name, rate in rates.items()), flush=True)
        return rates


def measure_stores(options: argparse.Namespace) -> bool:
    options.folder.mkdir(parents=True, exist_ok=True)
    good = True
    if not can_limit_memory(options.limit_mb << 20):
        return True
    for width in map(int, options.widths.split(",")):
        print(f"{width} bytes, {options.gigabytes:g} GB, {options.limit_mb} MB of memory")
        rates = {}
        for kind, package in STORES.items():
            if package is not None and importlib.util.find_spec(package) is None:
                print(f"  {kind} is left out: pip install {package}")
            else:
                rates[kind] = measure_store(kind, width, options)
        good &= compare(rates, f"{width} bytes, {options.gigabytes:g} GB in {options.limit_mb} MB")
    return good


def compare(rates: dict[str, dict[str, float]], case: str) -> bool:
    """Compare ours in one process with the others. Returns whether it is three times as fast as the best in one
    process."""
    good = True
    for kind, rates_of_store in rates.items():
        for name, other in rates_of_store.items():
            what, _, readers = name.partition(", ")
            if kind == OURS or not what.startswith("read"):
                continue
            rate = rates[OURS].get(f"{what}, 1 reader", 0.0)
            print(f"  {what}: {rate / other:.1f} x {kind}, {readers}")
            record("tiers", case, what, rate, "rows/s", peer=f"{kind}, {readers}", peer_value=other)
            good &= readers != "1 reader" or rate >= 3 * other
    return good
