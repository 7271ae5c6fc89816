"""Measure the peak anonymous memory of every operation on checkpoints.

    python benchmarks/bench_checkpoint_memory.py [--sizes 1,3] [--large 8.2] [--folder DIR] [--only TEXT] [--no-record]

Each case is an operation on a run with one table of 64 columns and row-wise Adagrad. It runs in a separate process,
whose RssAnon is sampled every 3 ms.

- save, resume: peak above that of training, for all policies of checkpoint.deltas and all tiers. There is a full save,
  a delta of few rows and one of all rows. --large has these operations only; with tier disk in a control group of 3 GB,
  in which a refusal by check_memory passes too.
- predict: the whole process without its tables.
- verify, compact, export: the whole process. import: the peak above that of the new model.

Results are stored in DIR/cases.json, and the same command continues with missing ones. The exit code is 1 if a case
takes more than 512 MB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from memory.cases import ALLOWED_BYTES, Measurement, Run, runs_of
from record import ROOT, parse_arguments, record
from result_store import ResultStore

from meseta.system.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits

DISK_SHARE, LARGE_DISK_SHARE = 6.5, 4.5
"""Disk space relative to the table: scratch file, checkpoints and outputs of commands."""
MOVED_SHARE, LARGE_MOVED_SHARE = 14, 8
"""Bytes that the processes of a run read or write, relative to the table."""
BYTES_PER_S, START_S = 0.25e9, 12.0
"""Rate of reads and writes on two shared cores, and start-up time of a process."""


def is_large(run: Run) -> bool:
    return run.operations == ("save", "resume")


def print_needs(runs: list[Run], store: ResultStore, folder: Path) -> bool:
    """Print what the missing cases need. Returns whether the disk has enough space."""
    missing = [run for run in runs if any(run.name(operation) not in store for operation in run.operations)]
    seconds = sum(
        run.gigabytes * 1e9 * (LARGE_MOVED_SHARE if is_large(run) else MOVED_SHARE) / BYTES_PER_S
        + START_S * len(run.operations)
        for run in missing
    )
    needed = max((run.gigabytes * (LARGE_DISK_SHARE if is_large(run) else DISK_SHARE) for run in missing), default=0)
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
            result = "refused by check_memory" if "refused" in case else f"{case['more'] / 1e6:,.0f} MB more"
            print(f"  {name}: {result}", flush=True)
    finally:
        measurement.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,3", help="GB of tables, for all operations")
    parser.add_argument("--large", default="8.2", help="likewise, for save and resume")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "checkpoint_memory")
    parser.add_argument("--only", default="", help="runs with a case whose name contains this")
    options = parse_arguments(parser)
    options.folder.mkdir(parents=True, exist_ok=True)
    sizes, large = ([float(size) for size in text.split(",") if size] for text in (options.sizes, options.large))
    store = ResultStore(options.folder / "cases.json")
    runs = [run for run in runs_of(sizes, large) if any(options.only in run.name(o) for o in run.operations)]
    if not print_needs(runs, store, options.folder):
        sys.exit("make room on the disk, or name another --folder")
    is_good = True
    for run in runs:
        names = [run.name(operation) for operation in run.operations]
        if not all(name in store for name in names):
            measure(run, store, options.folder)
        for name in (name for name in names if name in store):
            case = store.get(name, dict)
            if "refused" in case:
                continue
            is_good &= case["more"] <= ALLOWED_BYTES
            allowed = ALLOWED_BYTES / 1e6
            record("checkpoint memory", name, "more", case["more"] / 1e6, "MB", peer="allowed", peer_value=allowed)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
