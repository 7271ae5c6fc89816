"""How long deltas take and hold training up, and what loading a chain costs, beside whole saves and PyTorch's own."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from record import record
from tiers.process_memory import memory_bytes, reset_peak

from deltas.changing import ChangingTable
from meseta.checkpoint import SaveOptions, load, save, summarize
from meseta.checkpoint.background import copied
from meseta.checkpoint.changes import ChangedRows
from meseta.comm import World
from meseta.storage import SelectedRows

WIDTH, SHARE, CHAIN = 64, 0.2, 8


@dataclass(frozen=True)
class TimeOptions:
    """What to measure."""

    folder: Path
    gigabytes: float
    turns: int
    keep: bool


def forget(folder: Path) -> None:
    """Drop files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Saves:
    """Saves of one table by turns; each from the marks, as a run does it."""

    def __init__(self, options: TimeOptions, table: ChangingTable) -> None:
        self.options, self.table, self.world = options, table, World.single()
        self.folder = options.folder / "ours"
        self.step = 0
        self._former: dict[bool, list[Any]] = {True: [], False: []}
        """Copies of the last whole save and of the last delta: a run keeps its memory for the next."""
        self._last = False
        self._changes = ChangedRows(self.folder, self.world, "consecutive", 1 << 10)

    def save(self, *, whole: bool = False) -> tuple[float, float, int]:
        """Seconds that training is held up, and until all is on the disk, and bytes of memory beside the table."""
        gc.collect()
        reset_peak()
        before, start_s = memory_bytes("VmRSS"), time.perf_counter()
        base, rows = self._changes.take(0 if whole else self.step, [self.table.shard])
        self._former[whole] = copies = list(copied([self.table.shard], rows, self._former[whole]))
        self._last = whole
        held_s = time.perf_counter() - start_s
        self.step += 1
        known: dict[str, Any] = {"step": self.step, "plan": self.table.plan, "dense": {}, "state": {}}
        save(self.folder, world=self.world, shards=copies, options=SaveOptions(base=base), **known)
        return held_s, time.perf_counter() - start_s, memory_bytes("VmHWM") - before

    def selected_bytes(self) -> int:
        """Of the copy that was saved last."""
        [piece] = self._former[self._last]
        num_rows = len(piece.rows) if isinstance(piece, SelectedRows) else piece.shard.num_rows
        return int(num_rows * self.table.num_bytes / self.table.spec.num_embeddings)


def measure_times(options: TimeOptions) -> bool:
    """Whether deltas are as fast as they must be."""
    table = ChangingTable(int(options.gigabytes * 1e9 / (4 * WIDTH + 4)), WIDTH)
    tensors = {"row": table.shard.weight, **table.shard.state}
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    times: dict[str, list[float]] = {}
    saves = Saves(options, table)
    saves.save(whole=True)
    for turn in range(options.turns + 1):
        for name, whole in (("whole", True), ("delta", False)):
            table.touch(SHARE)
            held_s, durable_s, memory = saves.save(whole=whole)
            if turn:  # the first takes its memory
                for what, value in (("held up", held_s), ("durable", durable_s)):
                    times.setdefault(f"{name}, {what}", []).append(value)
            print(f"  {name}: held up {held_s:.3f} s, durable after {durable_s:.2f} s, {memory / 1e6:,.0f} MB more "
                  f"memory, {saves.selected_bytes() / 1e6:,.0f} MB copied", flush=True)  # fmt: skip
            if not whole and not turn:  # later ones have it
                times.setdefault("memory per byte", []).append(memory / saves.selected_bytes())
        for name, action in (("dcp", dcp_save), ("async_save", dcp_async)):
            begun = time.perf_counter()
            held_s = action(tensors, options.folder / "torch")
            times.setdefault(f"{name}, held up", []).append(held_s)
            times.setdefault(f"{name}, durable", []).append(time.perf_counter() - begun)
            shutil.rmtree(options.folder / "torch")
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"  {name}: {value:.3f}")
    good = load_part(options, table)
    for metric, peer, most in (
        ("delta, durable", "whole, durable", 0.4),
        ("delta, durable", "dcp, durable", 0.2),
        ("delta, held up", "whole, held up", 0.6),
        ("delta, held up", "async_save, held up", 0.25),
    ):
        ratio = medians[metric] / medians[peer]
        print(f"  {metric} / {peer}: {ratio:.2f} (at most {most})")
        good &= ratio <= most
        if options.keep:
            case = f"{options.gigabytes:g} GB, {SHARE:.0%} touched"
            record("deltas", case, metric, medians[metric], "s", peer=peer, peer_value=medians[peer])
    print(f"  memory per byte copied: {medians['memory per byte']:.2f} (at most 1.3)")
    return good and medians["memory per byte"] <= 1.3


def dcp_save(tensors: dict[str, torch.Tensor], path: Path) -> float:
    """Seconds."""
    start_s = time.perf_counter()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
    return time.perf_counter() - start_s


def dcp_async(tensors: dict[str, torch.Tensor], path: Path) -> float:
    """Seconds that training is held up."""
    start_s = time.perf_counter()
    saved: Any = dcp.async_save(tensors, checkpoint_id=path)
    held_s = time.perf_counter() - start_s
    saved.result()
    return held_s


def load_part(options: TimeOptions, table: ChangingTable) -> bool:
    """Whether a cold load of a chain costs no more for each byte than that of a whole checkpoint."""
    shutil.rmtree(options.folder / "ours")
    saves = Saves(options, table)
    saves.save(whole=True)
    whole = saves.folder / f"step-{saves.step:09d}"
    for _ in range(CHAIN - 1):
        table.touch(SHARE)
        saves.save()
    chain = saves.folder / f"step-{saves.step:09d}"
    other = ChangingTable(table.spec.num_embeddings, WIDTH, seed=1)
    rates: dict[Path, list[float]] = {whole: [], chain: []}
    for _ in range(options.turns):
        for path, seen in rates.items():
            forget(saves.folder)
            start_s = time.perf_counter()
            load(path, world=saves.world, shards=[other.shard])
            seen.append((time.perf_counter() - start_s) / summarize(path).num_bytes)
            print(f"  loaded {path.name} in {seen[-1] * summarize(path).num_bytes:.2f} s")
    assert torch.equal(other.shard.weight, table.shard.weight)
    cost = statistics.median(rates[chain]) / statistics.median(rates[whole])
    print(f"  a byte of a chain of {CHAIN} costs {cost:.2f} of one of a whole checkpoint to load (at most 1.2)")
    if options.keep:
        figures = [1e9 * statistics.median(rates[path]) for path in (chain, whole)]
        record("deltas", f"{options.gigabytes:g} GB, chain of {CHAIN}", "load", figures[0], "s/GB", peer="whole",
               peer_value=figures[1])  # fmt: skip
    return cost <= 1.2
