"""Tests of the bytes that a save writes per second, with simulated clocks and by an observer of real files."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from checkpoint.simulated import on_ranks, pieces, placed, plain_plan, random_tables, returned
from meseta.checkpoint import SaveOptions, WriteRateLimiter, save
from meseta.checkpoint.files.direct_io import MIN_BYTES_PER_S
from meseta.comm import World
from meseta.config import CheckpointConfig
from meseta.spec import MesetaError, OptimizerSpec, TableSpec
from meseta.train import saving as train_saving
from meseta.train.saving import CheckpointManager


class Write(NamedTuple):
    """Bytes written at some time between `start` and `end`."""

    start: float
    end: float
    num_bytes: int


class SimulatedRank:
    """Rank with a simulated clock that advances only by its actions."""

    def __init__(self, limit: float, draw: random.Random) -> None:
        self.now, self.writes, self._draw = 0.0, list[Write](), draw
        self.rate = WriteRateLimiter(limit, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds + self._draw.choice([0] * 300 + [1e-4, 5e-3])

    def write(self, num_bytes: int, stalls: bool) -> None:
        while num_bytes:
            size = min(num_bytes, self._draw.choice([self.rate.chunk_bytes(1 << 20)] * 100 + [4096, 77]))
            with self.rate.throttle(size):
                start = self.now
                self.now += self._draw.choice([0, 1e-4, 1e-3] * 20 + [1.3] if stalls else [0] * 50 + [1e-4])
                self.writes.append(Write(start, self.now, size))
            num_bytes -= size


def meet(ranks: list[SimulatedRank]) -> None:
    latest = max(rank.now for rank in ranks)
    for rank in ranks:
        rank.now = latest


def most_in_a_second(writes: list[Write]) -> int:
    """Return the largest number of bytes in one second, for any position of the bytes within their writes."""
    start, end, size = np.array(writes).T
    return max(int(size[(end >= begin) & (start <= begin + 1)].sum()) for begin in end)


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_no_second_holds_more(num_ranks: int, stalls: bool) -> None:
    """Consecutive saves write blocks on some ranks and then files on rank 0, with many and few bytes."""
    limit, draw = 16e6, random.Random(f"{num_ranks}/{stalls}")
    ranks = [SimulatedRank(limit, draw) for _ in range(num_ranks)]
    for total in (40_000_000, 300_000, 2_000_000, 5_000, 11_000_000, 90_000_000):
        num_writers = draw.randint(1, num_ranks)
        for rank in ranks:
            rank.rate.set_num_writers(num_writers)
        for rank in ranks[:num_writers]:
            rank.write(total // num_writers, stalls)
        meet(ranks)
        ranks[0].rate.set_num_writers(1)
        ranks[0].write(total // 50, stalls)
        meet(ranks)
    writes = [write for rank in ranks for write in rank.writes]
    assert 0.3 * limit < most_in_a_second(writes) <= limit
    if not stalls:
        seconds = max(rank.now for rank in ranks)
        assert sum(write.num_bytes for write in writes) > 0.6 * limit * seconds


def test_writes_of_all_threads_take_turns() -> None:
    """The threads are those of one rank, in real time."""
    rate, writes = WriteRateLimiter(2e6), list[Write]()

    def write() -> None:
        for _ in range(60):
            with rate.throttle(size := rate.chunk_bytes(1 << 20)):
                start = time.monotonic()
                time.sleep(1e-4)
                writes.append(Write(start, time.monotonic(), size))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 180
    assert all(before.end <= after.start for before, after in pairwise(writes))
    assert most_in_a_second(writes) <= 2e6


def test_a_lifted_limit_delays_no_write() -> None:
    """Neither a waiting thread nor a new one waits."""
    slept, lifted = list[float](), threading.Event()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        lifted.set()

    rate = WriteRateLimiter(1e6, is_disabled=lifted.is_set, clock=lambda: 5.0, sleep=sleep)
    assert rate.chunk_bytes(1 << 20) == 7812
    for _ in range(2):
        with rate.throttle(7812):
            pass
    assert slept == [pytest.approx(7812 / 0.95e6)]
    assert rate.chunk_bytes(1 << 20) == 1 << 20
    with rate.throttle(1 << 20), rate.throttle(1 << 20):  # side by side
        pass
    assert len(slept) == 1


def test_less_than_ranks_can_share_is_refused() -> None:
    rate = WriteRateLimiter(3 * MIN_BYTES_PER_S)
    rate.set_num_writers(3)
    with pytest.raises(
        MesetaError, match=r"3,000,000 bytes per second is too low for 4 writing ranks; allow at least 1,000,000"
    ):
        rate.set_num_writers(4)
    with pytest.raises(MesetaError, match="1,000 bytes per second"):
        WriteRateLimiter(1000)


SPECS = [
    TableSpec(name=name, num_embeddings=rows, embedding_dim=16, optimizer=OptimizerSpec(name="rowwise_adagrad"))
    for name, rows in (("direct", 16_000), ("user", 9_000), ("item", 4_000), ("odd", 7))
]
TABLES = random_tables(SPECS, seed=3)
CARRIED = {"pooled": torch.ones(90_000), "ids": torch.arange(50)}
DENSE = {"weight": torch.arange(150_000.0), "bias": torch.ones(3)}


def save_on(num_ranks: int, parent: Path, limit: float | None) -> None:
    plan = plain_plan(SPECS, num_ranks, "row_wise")

    def run(world: World) -> Path:
        shards = pieces(SPECS, plan, world.rank, TABLES)
        options = SaveOptions(
            prefetched_embeddings=CARRIED, rate_limiter=None if limit is None else WriteRateLimiter(limit)
        )
        return save(parent, world=world, step=1, plan=plan, shards=shards, dense=DENSE, state={}, options=options)

    returned(on_ranks(num_ranks, run))


def bytes_in(folder: Path, sizes: dict[int, int]) -> int:
    """Return the bytes of all files ever seen there, by inode."""
    # Folders and files may be renamed meanwhile: os.walk skips such folders.
    for path in (Path(parent) / name for parent, _, names in os.walk(folder) for name in names):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        sizes[status.st_ino] = max(sizes.get(status.st_ino, 0), status.st_size)
    return sum(sizes.values())


def test_files_grow_so_fast_and_no_faster(tmp_path: Path) -> None:
    """Three ranks write blocks past the page cache and through it, dense and deferred tensors and the manifest. The
    bytes are those of a save without limit."""
    limit, sizes, seen = 3e6, dict[int, int](), list[tuple[float, float, int]]()
    (tmp_path / "slow").mkdir()
    saving = threading.Thread(target=save_on, args=(3, tmp_path / "slow", limit))
    began = time.monotonic()
    saving.start()
    while saving.is_alive():
        before = time.monotonic()
        num_bytes = bytes_in(tmp_path / "slow", sizes)
        seen.append((before, time.monotonic(), num_bytes))
        time.sleep(0.005)
    assert time.monotonic() - began > 1
    saving.join()
    save_on(3, tmp_path / "fast", None)
    files = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "slow", tmp_path / "fast")
    ]
    assert files[0] == files[1] and len(files[0]) == 7
    assert sum(map(len, files[0].values())) > limit
    for first, _, had in seen:
        assert max(has - had for _, last, has in seen if last - first <= 1) <= limit


def make_saver(folder: Path, monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> CheckpointManager:
    monkeypatch.setattr(
        train_saving.checkpoint,
        "WriteRateLimiter",
        lambda limit, **options: WriteRateLimiter(limit, **options, **replaced),
    )
    return CheckpointManager(CheckpointConfig(max_bytes_per_s=1e6, background="always"), folder, World.single())


def test_a_signal_is_not_held_back_and_the_last_save_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A background save that a signal interrupts continues at the speed of the last save."""
    plan, now, signalled = plain_plan(SPECS, 1, "table_wise"), [0.0], list[float]()
    embeddings = placed(plan, pieces(SPECS, plan, 0, TABLES))

    def sleep(seconds: float) -> None:
        assert not signalled
        now[0] += seconds
        if now[0] > 1 and stops:
            saver.signal_listener.signal_number = signal.SIGTERM
            signalled.append(now[0])

    for stops in (False, True):
        now[0] = 0.0
        saver = make_saver(tmp_path / str(stops), monkeypatch, clock=lambda: now[0], sleep=sleep)
        saver.save(1, embeddings, DENSE, {}, None, is_last=False)
        saver.wait()
        saver.apply_flag_sums([float(stops), 0.0, 0.0])
        saver.save(2, embeddings, DENSE, {}, None, is_last=True)
        assert signalled or now[0] > 4
    assert signalled and now[0] < 1.1


@pytest.mark.parametrize(("stall_timeout_s", "least"), [(600, "1,000,000"), (10, "26,843,546")])
def test_slower_than_ranks_wait_for_each_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall_timeout_s: float, least: str
) -> None:
    limits = train_saving.ProcessTimeouts.limits
    monkeypatch.setattr(train_saving.ProcessTimeouts, "limits", type(limits)(stall_timeout_s=stall_timeout_s))
    world = World(rank=1, size=2, device=torch.device("cpu"))
    with pytest.raises(MesetaError, match=f"is 1,500,000, but must be at least {least} per rank"):
        CheckpointManager(CheckpointConfig(max_bytes_per_s=1.5e6), tmp_path, world)
    CheckpointManager(CheckpointConfig(max_bytes_per_s=6e7), tmp_path, world)
