"""Peak anonymous memory of every operation on checkpoints, with its limit.

    python benchmarks/bench_checkpoint_memory.py [--sizes 1,3] [--large 8.2] [--folder DIR] [--only TEXT] [--no-record]

Each case is an operation on a run of one table, rows of 64 float32 with the state of row-wise Adagrad. A separate
process runs it, whose RssAnon in /proc is sampled every 3 ms.

- save, resume: the peak of saves, and of loading and the saves after it, above that of training. There is a whole
  save, a delta with few changed rows and one with all. The policies are those of checkpoint.deltas, the tiers hbm,
  cached and disk. With tier disk, saves run in the background of training. Tables of --large are measured with these
  operations only. Those with tier disk run in a control group of 3 GB, where a refusal by check_memory passes too.
  With tier cached, training is measured without saves: rows in memory take pages only as training changes them.
- predict: the whole process, less the tables that it holds.
- verify, compact, export: the whole process. import: the peak above that of the new model, with all of its rows.

Finished cases are kept in DIR/cases.json, and the same command continues with the rest. It first prints how many hours
and how much disk it needs. It appends to benchmarks/results.csv, and exits with 1 if a case takes more than 512 MB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from kept import Kept
from memory.cases import ALLOWED_BYTES, Measurement, Run, runs_of
from record import ROOT, record

from meseta.system.kernel import KernelFiles, free_memory_bytes, read_cgroup_limits

DISK_SHARE, LARGE_DISK_SHARE = 6.5, 4.5
"""Bytes of the disk over those of a table: its scratch file, checkpoints, and what commands make of them."""
MOVED_SHARE, LARGE_MOVED_SHARE = 14, 8
"""Bytes that the processes of a run read or write, likewise."""
BYTES_PER_S, START_S = 0.25e9, 12.0
"""Measured rate of reads and writes on two shared cores, and the start-up time of a process."""


def is_large(run: Run) -> bool:
    return run.operations == ("save", "resume")


def print_needs(runs: list[Run], kept: Kept, folder: Path) -> bool:
    """Print what the unfinished cases need; returns whether the disk has it."""
    missing = [run for run in runs if any(run.name(operation) not in kept for operation in run.operations)]
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


def measure(run: Run, kept: Kept, folder: Path) -> None:
    """All cases of a run."""
    free = free_memory_bytes(KernelFiles(), read_cgroup_limits(KernelFiles()))
    needed = run.table_bytes + (2 << 30)
    if free is not None and needed > free:
        print(f"{run.gigabytes:g} GB in {run.tier} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free")
        return
    measurement = Measurement(run, folder)
    try:
        for operation in run.operations:
            name = run.name(operation)
            if name in kept:
                if operation in ("save", "resume"):  # the next ones need what it writes
                    measurement.measure(operation)
                continue
            found = kept.get(name, lambda operation=operation: measurement.measure(operation))
            result = "refused by check_memory" if "refused" in found else f"{found['more'] / 1e6:,.0f} MB more"
            print(f"  {name}: {result}", flush=True)
    finally:
        measurement.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,3", help="GB of tables, for all operations")
    parser.add_argument("--large", default="8.2", help="likewise, for save and resume")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "checkpoint_memory")
    parser.add_argument("--only", default="", help="runs with a case whose name contains this")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.csv as it is")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sizes, large = ([float(size) for size in text.split(",") if size] for text in (options.sizes, options.large))
    kept = Kept(options.folder / "cases.json")
    runs = [run for run in runs_of(sizes, large) if any(options.only in run.name(o) for o in run.operations)]
    if not print_needs(runs, kept, options.folder):
        sys.exit("make room on the disk, or name another --folder")
    is_good = True
    for run in runs:
        names = [run.name(operation) for operation in run.operations]
        if not all(name in kept for name in names):
            measure(run, kept, options.folder)
        for name in (name for name in names if name in kept):
            found = kept.get(name, dict)
            if "refused" in found:
                continue
            is_good &= found["more"] <= ALLOWED_BYTES
            if not options.no_record:
                allowed = ALLOWED_BYTES / 1e6
                record("checkpoint memory", name, "more", found["more"] / 1e6, "MB", peer="allowed", peer_value=allowed)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
