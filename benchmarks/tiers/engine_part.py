"""Random reads of rows compared with a bare loop that reads the same blocks."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from record import record

from meseta.ops.core import core
from meseta.ops.row_file import DiskEngine, RowFile

WAYS = tuple(("ring", depth) for depth in (16, 32, 64, 128, 256)) + tuple(("threads", depth) for depth in (16, 32, 64))
LOADS = (0.25, 0.5, 0.75)
MADE_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Turn:
    reads_per_s: float
    processor_s: float
    """CPU seconds per read."""

    @property
    def text(self) -> str:
        return f"{self.reads_per_s:,.0f} reads/s at {self.processor_s * 1e6:.1f} us of the processor"


def compile_loop(folder: Path) -> Path:
    program = folder / "bare_loop"
    source = Path(__file__).with_name("bare_loop.c")
    subprocess.run(["cc", "-O2", "-pthread", "-o", str(program), str(source)], check=True)
    return program


@dataclass(frozen=True)
class BareLoop:
    program: Path
    file: RowFile

    def turn(self, way: tuple[str, int], num_reads: int, seed: int, *, copies: bool = False) -> Turn:
        """Read random entries with one request each. With `copies`, each record is copied to its place."""
        block = self.file.engine.info.block_bytes
        entry, group, entries, segment, in_segment, _ = core().row_layout(self.file.record_bytes, block, 256 << 10)
        total = self.file.num_written_rows // in_segment * in_segment
        copied = self.file.record_bytes if copies else 0
        numbers = (way[1], num_reads, seed, total, segment, in_segment, group, entries, entry, block, copied)
        command = [str(self.program), self.file.path, way[0], *map(str, numbers)]
        seconds, processor_s = map(float, subprocess.run(command, check=True, capture_output=True).stdout.split())
        return Turn(num_reads / seconds, processor_s / num_reads)


def fill(file: RowFile) -> None:
    records = torch.randint(0, 256, (MADE_AT_ONCE, file.record_bytes), dtype=torch.uint8)
    for first in range(0, file.num_rows, MADE_AT_ONCE):
        count = min(MADE_AT_ONCE, file.num_rows - first)
        file.write(torch.arange(first, first + count), records[:count])
    file.flush()


def engine_turn(file: RowFile, num_reads: int, seed: int) -> Turn:
    """Read random rows into existing memory, like a cache."""
    rows = torch.randint(0, file.num_rows, (num_reads,), generator=torch.Generator().manual_seed(seed))
    out = torch.zeros(num_reads, file.record_bytes, dtype=torch.uint8)
    out.fill_(1)
    start_s, before_s = time.perf_counter(), time.process_time()
    present = file.read(rows, out).wait()
    seconds, processor_s = time.perf_counter() - start_s, time.process_time() - before_s
    if not present.all():
        raise RuntimeError("rows are missing")
    return Turn(num_reads / seconds, processor_s / num_reads)


def measure(file: RowFile, loop: BareLoop, options: argparse.Namespace) -> bool:
    """Measure one file. Returns whether it meets the requirements."""
    ours: list[Turn] = []
    bare: list[Turn] = []
    copying: list[Turn] = []
    best = ("ring" if options.engine != "threads" else "threads", file.engine.queue_depth)
    for number in range(options.passes):
        if number % 2:
            ours.append(engine_turn(file, options.num_reads, number))
        bare.append(loop.turn(best, options.num_reads, number))
        if not number % 2:
            ours.append(engine_turn(file, options.num_reads, number))
        if best[0] == "ring":
            copying.append(loop.turn(best, options.num_reads, number, copies=True))
        print(f"  pass {number + 1}: ours {ours[-1].text}; the loop ({best[0]} {best[1]}) {bare[-1].text}", flush=True)
        if number == 0:  # by now every way finds the file as it is
            tried = {way: loop.turn(way, options.num_reads // 2, 99).reads_per_s for way in WAYS}
            best = max(tried, key=lambda way: tried[way])
    rate, limit = (statistics.median(turn.reads_per_s for turn in turns[1:]) for turns in (ours, bare))
    spent_s, bare_s = (statistics.median(turn.processor_s for turn in turns[1:]) for turns in (ours, bare))
    counters = file.counters
    case = f"{file.record_bytes} bytes, {options.gigabytes:g} GB, {file.engine.info.engine}"
    peer = f"bare loop, {best[0]} {best[1]}, passes 2-{options.passes}"
    print(f"  {counters.read_bytes / counters.num_rows_read:,.0f} bytes read per row")
    record("tiers", case, "reads", rate, "reads/s", peer=peer, peer_value=limit)
    record("tiers", case, "processor of a read", spent_s * 1e6, "us", peer=peer, peer_value=bare_s * 1e6)
    print(f"  {rate / limit:.2f} of the loop's reads/s, {spent_s / bare_s:.2f} of its processor time")
    if copying[1:]:
        copied_s = statistics.median(turn.processor_s for turn in copying[1:])
        print(f"  {spent_s / copied_s:.2f} of that of a loop that copies each record, {copied_s * 1e6:.2f} us")
        peer = f"loop that copies, {best[0]} {best[1]}"
        record("tiers", case, "processor of a read", spent_s * 1e6, "us", peer=peer, peer_value=copied_s * 1e6)
    for load in LOADS:
        file.engine.max_reads_per_s = load * limit
        before = file.engine.latencies()
        engine_turn(file, int(load * options.num_reads), 7)
        p50, p99 = (file.engine.latencies() - before).quantiles([0.5, 0.99])
        print(f"  at {load:.0%} load: p50 {p50 * 1e6:,.0f} us, p99 {p99 * 1e6:,.0f} us")
    file.engine.max_reads_per_s = None
    return rate >= 0.9 * limit and spent_s <= 1.3 * bare_s


def measure_engine(options: argparse.Namespace) -> bool:
    """Measure all widths. Returns whether each meets its requirements."""
    good = True
    engine = DiskEngine(options.folder, options.engine)
    print(engine.info.summary)
    with tempfile.TemporaryDirectory() as folder:
        program = compile_loop(Path(folder))
        for width in map(int, options.widths.split(",")):
            file = RowFile(engine, f"rows{width}", num_rows=int(options.gigabytes * 1e9 / width), record_bytes=width)
            start_s = time.perf_counter()
            fill(file)
            seconds = time.perf_counter() - start_s
            written = f"{file.num_rows:,} rows written at {file.num_rows * width / seconds / 1e6:,.0f} MB/s"
            print(f"{width} bytes: {written}; {file.num_bytes() / 1e6:,.0f} MB of memory", flush=True)
            good &= measure(file, BareLoop(program, file), options)
            file.close()
    return good
