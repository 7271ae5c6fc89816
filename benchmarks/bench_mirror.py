"""The share of a mirrored save that comparing manifests takes.

    python benchmarks/bench_mirror.py [--rows 4000000] [--width 64] [--saves 6] [--no-record]

A run with one table of row-wise Adagrad saves again and again, with `deltas` none and consecutive, to a directory with
a mirror on the same disk. Between two saves 20 % of the rows change. A save is timed with its copy to the mirror and
the files that it reads back. Comparing is listing the mirror and run_dir and reading, checking and comparing their
manifests. Medians without the first save. Exits with 1 if a share is above 1 %.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from deltas.changing import ChangingTable
from record import ROOT, record

from meseta.checkpoint.store.contents import CheckpointFiles, StoreContents
from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.embedding import EmbeddingBagCollection
from meseta.train.saving import CheckpointManager

MAX_SHARE = 0.01
COMPARING = [
    (StoreContents, "refresh"),
    (StoreContents, "add"),
    (StoreContents, "has_file"),
    (StoreContents, "incomplete_files"),
]
COMPARING += [(StoreContents, "incomplete_files"), (CheckpointFiles, "conflicts_with")]


class Stopwatch:
    """Seconds spent in some functions, without those that they call among themselves twice."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are timed."""

        def call(*args: Any) -> Any:
            start_s = time.perf_counter()
            self._depth += 1
            try:
                return function(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start_s

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mirror")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.csv as it is")
    chosen = parser.parse_args()
    watch = Stopwatch()
    for owner, name in COMPARING:
        setattr(owner, name, watch.timed(getattr(owner, name)))
    shares = []
    for deltas in ("none", "consecutive"):
        shutil.rmtree(chosen.folder, ignore_errors=True)
        try:
            save_s, compare_s = measure(chosen, deltas, watch)
        finally:
            shutil.rmtree(chosen.folder, ignore_errors=True)
        shares.append(compare_s / save_s)
        print(f"deltas {deltas}: {compare_s * 1e3:.2f} ms of {save_s:.3f} s, {compare_s / save_s:.3%}")
        if not chosen.no_record:
            case = f"{chosen.rows} rows of {chosen.width}, deltas {deltas}"
            record("mirror", case, "comparing manifests", compare_s, "s", peer="mirrored save", peer_value=save_s)
    sys.exit(max(shares) > MAX_SHARE)


def measure(chosen: argparse.Namespace, deltas: Any, watch: Stopwatch) -> tuple[float, float]:
    """Median seconds of a mirrored save, and of comparing in it."""
    table = ChangingTable(chosen.rows, chosen.width)
    config = CheckpointConfig(
        deltas=deltas, background="never", keep_last=2, mirror=f"file://{chosen.folder.resolve()}/mirror"
    )
    saver = CheckpointManager(config, chosen.folder / "run" / "checkpoints", World.single())
    embeddings = EmbeddingBagCollection.__new__(EmbeddingBagCollection)
    embeddings.__dict__.update(plan=table.plan, shards=[table.shard])
    saves, compared = [], []
    for step in range(1, chosen.saves + 1):
        table.touch(0.2)
        watch.seconds, start_s = 0.0, time.perf_counter()
        saver.save(step, embeddings, {}, {}, None, is_last=False)
        saves.append(time.perf_counter() - start_s)
        compared.append(watch.seconds)
        saver.saved_step = step
        if notes := saver.pop_warnings():
            sys.exit("\n".join(notes))
    return median(saves[1:]), median(compared[1:])


if __name__ == "__main__":
    main()
