"""Durable saves and cold loads of a whole table, compared with torch, numpy and the disk alone."""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from common.processes import check_tests
from common.timing import alternate, seconds
from record import record
from torch import Tensor

from checkpoints.changing import (
    ChangingTable,
    empty_folder,
    forget,
    save_with_dcp,
    seconds_without_training,
    table_of,
)
from meseta.checkpoint import load, save
from meseta.checkpoint.background import BackgroundSaver
from meseta.comm import World

DISK = "the disk alone"
PEERS = ("torch.save", "torch.distributed.checkpoint", "numpy.save", DISK)
BLOCK_BYTES = 1 << 24
Action = Callable[[Path], object]
PACKAGES = ("torch", "numpy", "pyarrow")


def measure_full(options: argparse.Namespace) -> bool:
    check_tests("tests/checkpoint/test_round_trip.py")
    folder, table = empty_folder(options), table_of(options)
    tensors = table.tensors
    methods: dict[str, tuple[Action, Action]] = {
        "meseta": (partial(save_ours, table), partial(load_ours, table)),
        "torch.distributed.checkpoint": (partial(save_with_dcp, tensors), partial(load_with_dcp, tensors)),
        "torch.save": (partial(save_torch, tensors), load_torch),
        "numpy.save": (partial(save_numpy, tensors), load_numpy),
        DISK: (partial(write_alone, table.num_bytes), read_alone),
    }
    times = race(methods, folder / "now", options.turns)
    pauses = race_in_background(folder, table, options.turns)
    shutil.rmtree(folder)
    num_mb = table.num_bytes / 1e6
    case = f"{num_mb:.0f} MB, {table.spec.num_embeddings} x {table.spec.embedding_dim}"
    for (metric, ours_s), peer in itertools.product(times["meseta"].items(), PEERS):
        record("checkpoint", case, metric, num_mb / ours_s, "MB/s", peer=peer, peer_value=num_mb / times[peer][metric],
               packages=PACKAGES)  # fmt: skip
    for name, (ours_s, peer_s) in pauses.items():
        record("checkpoint", case, name, ours_s, "s", peer="torch.distributed.checkpoint async_save",
               peer_value=peer_s, packages=PACKAGES)  # fmt: skip
    return True


def race(methods: dict[str, tuple[Action, Action]], path: Path, num_turns: int) -> dict[str, dict[str, float]]:

    def turn(write: Action, read: Action) -> tuple[float, float]:
        written_s = seconds(partial(write, path))
        forget(path)
        loaded_s = seconds(partial(read, path))
        shutil.rmtree(path)
        return written_s, loaded_s

    turns = alternate({name: partial(turn, *actions) for name, actions in methods.items()}, num_turns)
    return {
        name: dict(zip(("durable save", "cold load"), map(statistics.median, zip(*times, strict=True)), strict=True))
        for name, times in turns.items()
    }


def save_ours(table: ChangingTable, path: Path) -> None:
    save(path, world=World.single(), step=1, plan=table.plan, shards=[table.shard], dense={}, state={})


def load_ours(table: ChangingTable, path: Path) -> None:
    """Load into the table itself, whose content is equal."""
    load(path / "step-000000001", world=World.single(), shards=[table.shard])


def race_in_background(folder: Path, table: ChangingTable, num_turns: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of (ours, torch) for which saves stop training: of the first, and the median of later ones."""
    background = BackgroundSaver(World.single())
    waits: list[tuple[float, float]] = []
    for index in range(1 + num_turns):
        start_s = time.perf_counter()
        background.start(folder / f"ours-{index}", shards=[table.shard], dense={}, step=1, plan=table.plan, state={},
                         on_saved=lambda world: None)  # fmt: skip
        ours_s = time.perf_counter() - start_s
        background.wait()
        waits.append((ours_s, seconds_without_training(table.tensors, folder / f"torch-{index}")))
        for path in folder.iterdir():
            shutil.rmtree(path)
    later = [statistics.median(wait[i] for wait in waits[1:]) for i in (0, 1)]
    return {"held up, first save": waits[0], "held up, later save": (later[0], later[1])}


def load_with_dcp(tensors: dict[str, Tensor], path: Path) -> None:
    dcp.load({name: torch.empty_like(tensor) for name, tensor in tensors.items()}, checkpoint_id=path)


def save_torch(tensors: dict[str, Tensor], path: Path) -> None:
    path.mkdir()
    torch.save(tensors, path / "table.pt")
    sync(path / "table.pt")


def load_torch(path: Path) -> None:
    torch.load(path / "table.pt", weights_only=True)


def save_numpy(tensors: dict[str, Tensor], path: Path) -> None:
    path.mkdir()
    for name, tensor in tensors.items():
        np.save(path / f"{name}.npy", tensor.numpy())
        sync(path / f"{name}.npy")


def load_numpy(path: Path) -> None:
    for file in path.glob("*.npy"):
        np.load(file)


def write_alone(num_bytes: int, path: Path) -> None:
    """Write directly, without the page cache."""
    path.mkdir()

    def write(part: int) -> None:
        descriptor = os.open(path / f"{part}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            block.write(bytes([1 + part]) * BLOCK_BYTES)
            for start in range(0, num_bytes // 2, BLOCK_BYTES):
                os.pwrite(descriptor, block, start)
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))


def read_alone(path: Path) -> None:
    def read(file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            start = 0
            while count := os.preadv(descriptor, [block], start):
                start += count
        os.close(descriptor)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, path.iterdir()))


def sync(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
