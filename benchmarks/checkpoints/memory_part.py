"""Peak anonymous memory of every operation on checkpoints, compared with a limit."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from common.result_store import ResultStore
from record import record

from checkpoints.memory_cases import ALLOWED_BYTES, Measurement, Run, runs_of
from meseta.system.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits

DISK_SHARE = 6.5
"""Disk space relative to the table: scratch file, checkpoints and outputs of commands."""
MOVED_SHARE = 14
"""Bytes that the processes of a run read or write, relative to the table."""
BYTES_PER_S, START_S = 0.25e9, 12.0
"""Rate of reads and writes on two shared cores, and start-up time of a process."""


def print_needs(runs: list[Run], store: ResultStore, folder: Path) -> bool:
    """Print what the missing cases need. Returns whether the disk has enough space."""
    missing = [run for run in runs if any(run.name(operation) not in store for operation in run.operations)]
    seconds = sum(run.gigabytes * 1e9 * MOVED_SHARE / BYTES_PER_S + START_S * len(run.operations) for run in missing)
    needed = max((run.gigabytes * DISK_SHARE for run in missing), default=0)
    free = shutil.disk_usage(folder).free / 1e9
    num_cases = sum(len(run.operations) for run in runs)
    print(
        f"{num_cases} cases of {len(runs)} runs, {len(missing)} of which are not finished: about {seconds / 3600:.1f} "
        f"hours, and {needed:.0f} GB of disk, of which {free:.0f} are free",
        flush=True,
    )
    return needed <= free


def measure(run: Run, store: ResultStore, folder: Path) -> None:
    free = free_memory_bytes(KernelFiles(), read_cgroup_limits(KernelFiles()))
    needed = run.table_bytes + (2 << 30)
    if free is not None and needed > free:
        print(f"{run.gigabytes:g} GB in {run.tier} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free")
        return
    measurement = Measurement(run, folder)
    try:
        for operation in run.operations:
            name = run.name(operation)
            if name in store:
                if operation in ("save", "resume"):  # Later operations need its checkpoint.
                    measurement.measure(operation)
                continue
            case = store.get(name, lambda operation=operation: measurement.measure(operation))
            print(f"  {name}: {case['more'] / 1e6:,.0f} MB more", flush=True)
    finally:
        measurement.close()


def measure_memory(options: argparse.Namespace) -> bool:
    folder: Path = options.folder / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    store = ResultStore(folder / "cases.json")
    runs = runs_of([float(size) for size in options.sizes.split(",")])
    runs = [run for run in runs if any(options.only in run.name(o) for o in run.operations)]
    if not print_needs(runs, store, folder):
        sys.exit("make room on the disk, or name another --folder")
    is_good = True
    for run in runs:
        names = [run.name(operation) for operation in run.operations]
        if not all(name in store for name in names):
            measure(run, store, folder)
        for name in (name for name in names if name in store):
            more_bytes = store.get(name, dict)["more"]
            is_good &= more_bytes <= ALLOWED_BYTES
            allowed_mb = ALLOWED_BYTES / 1e6
            record("checkpoint memory", name, "more", more_bytes / 1e6, "MB", peer="allowed", peer_value=allowed_mb)
    return is_good
