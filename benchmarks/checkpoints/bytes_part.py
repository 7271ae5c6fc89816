"""Bytes that checkpoints of a run write and store, for all policies and widths."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from common.tables import table
from record import record

from checkpoints.changing import ChangingTable, empty_folder, row_bits
from meseta.checkpoint import SaveOptions, prune, save
from meseta.checkpoint.background import copy_shards
from meseta.checkpoint.delta_tracker import DeltaTracker
from meseta.comm import World

POLICIES = ("none", "one_shot", "consecutive", "intermittent", "rolling")
LEAST = {"exact": (2.2, 1.0), "8": (7.0, 3.2), "4": (12.0, 5.5)}
"""Required reductions of (written bytes, stored bytes), by bits. One policy must reach all."""


@dataclass
class Disk:
    """Bytes of files in a folder."""

    folder: Path
    written: int = 0
    highest: int = 0
    """Maximum size of the folder, including a checkpoint that replaces another."""

    def __post_init__(self) -> None:
        self._seen: set[tuple[Path, int]] = set()

    def look(self) -> None:
        """Count new files. Call this after each save and before old checkpoints are removed."""
        held = 0
        for path in self.folder.rglob("*"):
            if path.is_file():
                status = path.stat()
                held += status.st_size
                if (path, status.st_mtime_ns) not in self._seen:  # a removed file's inode is soon another's
                    self._seen.add((path, status.st_mtime_ns))
                    self.written += status.st_size
        self.highest = max(self.highest, held)


def run(options: argparse.Namespace, width: int, policy: str, bits: str) -> Disk:
    changing, world = ChangingTable(options.num_rows, width), World.single()
    shards = [changing.shard]
    of_tables = row_bits(changing.spec.name, bits)
    folder = empty_folder(options)
    disk, changes = Disk(folder), DeltaTracker(folder, world, policy, options.max_chain)  # type: ignore[arg-type]
    for step in range(1, options.num_intervals + 1):
        changing.touch(options.share)
        base, rows = changes.begin_save(step - 1, shards, of_tables)
        copies = shards if rows is None else copy_shards(shards, rows)
        save(folder, world=world, step=step, plan=changing.plan, shards=copies, dense={}, state={},
             options=SaveOptions(base=base, bits=of_tables))  # fmt: skip
        disk.look()
        prune(folder, keep_last=2)
    shutil.rmtree(folder)
    return disk


def measure_bytes(options: argparse.Namespace) -> bool:
    reached = {policy: True for policy in POLICIES if policy != "none"}
    widths = [int(width) for width in options.widths.split(",")]
    for width in widths:
        whole = run(options, width, "none", "exact")
        rows = []
        for bits in options.bits.split(","):
            for policy in POLICIES if bits != "exact" else POLICIES[1:]:
                disk = run(options, width, policy, bits)
                less = whole.written / disk.written, whole.highest / disk.highest
                row = f"{disk.written / 1e9:.3f} GB", f"{less[0]:.2f}", f"{disk.highest / 1e9:.3f} GB", f"{less[1]:.2f}"
                rows.append([bits, policy, *row])
                if width == widths[0] and policy != "none":
                    reached[policy] &= all(a >= b for a, b in zip(less, LEAST.get(bits, (0.0, 0.0)), strict=True))
                case = f"{options.num_rows} x {width}, {policy}, {bits}"
                for metric, value, peer in (
                    ("written", disk.written, whole.written),
                    ("held", disk.highest, whole.highest),
                ):
                    record("deltas", case, metric, value / 1e9, "GB", peer="whole saves", peer_value=peer / 1e9)
        title = f"{options.num_rows:,} x {width}, {options.num_intervals} intervals, whole saves write "
        title += f"{whole.written / 1e9:.2f} GB and hold {whole.highest / 1e9:.2f} GB"
        table(title, ("bits", "policy", "written", "less", "held", "less"), rows)
    print("reached at every width by: " + (", ".join(name for name, good in reached.items() if good) or "none"))
    return any(reached.values())
