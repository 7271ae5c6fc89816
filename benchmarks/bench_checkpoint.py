"""Compare durable saves and cold loads with torch.save, torch.distributed.checkpoint and numpy.

    python benchmarks/bench_checkpoint.py [size_mb]

Files are written to TMPDIR, which should be on a disk. Saves end with fsync, loads start with an empty page cache. Only
Meseta computes and verifies SHA-256. "held up" is the pause of training by a background save. "the disk alone" is the
limit: direct transfers of 16 MB, two at a time.
"""

import itertools
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from record import record
from torch import Tensor

from meseta.checkpoint import load, save
from meseta.checkpoint.background import BackgroundSaver
from meseta.comm import World
from meseta.optim import make_row_optimizer
from meseta.spec import Plan, TableSpec
from meseta.storage import TableShard

ROOT = Path(__file__).resolve().parent.parent
NUM_ROUNDS = 5
WIDTH = 64
DISK = "the disk alone"
PEERS = ("torch.save", "torch.distributed.checkpoint", "numpy.save", DISK)
BLOCK_BYTES = 1 << 24
PACKAGES = ("torch", "numpy", "pyarrow")


def main() -> None:
    size_mb = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    test = str(ROOT / "tests/checkpoint/test_round_trip.py")
    subprocess.run([sys.executable, "-m", "pytest", test], check=True, cwd=ROOT)
    spec = TableSpec(name="table", num_embeddings=size_mb * 1_000_000 // (WIDTH * 4 + 4), embedding_dim=WIDTH)
    plan = Plan.from_dict({"tables": {"table": "table_wise"}}, [spec], 1)
    optimizer = make_row_optimizer(spec.optimizer)
    weight = torch.rand(spec.num_embeddings, WIDTH)
    shard = TableShard(
        spec=spec, shard=plan["table"].shards[0], weight=weight, state=optimizer.init(weight), optimizer=optimizer
    )
    tensors = {"row": shard.weight, **shard.state}
    methods = {
        "meseta": (lambda path: save_ours(path, plan, shard), lambda path: load_ours(path, shard)),
        "torch.distributed.checkpoint": (
            lambda path: save_distributed(path, tensors),
            partial(load_distributed, tensors),
        ),
        "torch.save": (lambda path: save_torch(path, tensors), load_torch),
        "numpy.save": (lambda path: save_numpy(path, tensors), load_numpy),
        DISK: (partial(write_alone, sum(t.numel() * t.element_size() for t in tensors.values())), read_alone),
    }
    with tempfile.TemporaryDirectory() as folder:
        times = race(methods, Path(folder))
        held_up = race_in_background(Path(folder), plan, shard, tensors)
    num_mb = sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6
    case = f"{num_mb:.0f} MB, {spec.num_embeddings} x {WIDTH}"
    for (metric, ours), peer in itertools.product(times["meseta"].items(), PEERS):
        peer_spent = times[peer][metric]
        wall = {"value": num_mb / ours.wall_s, "unit": "MB/s", "peer_value": num_mb / peer_spent.wall_s}
        cpu = {"value": ours.cpu_s, "unit": "s", "peer_value": peer_spent.cpu_s}
        for name, figures in ((metric, wall), (f"{metric}, processor", cpu)):
            if figures is cpu and peer == DISK:
                continue  # it makes nothing of the bytes
            record("checkpoint", case, name, peer=peer, packages=PACKAGES, **figures)
    for name, (ours_s, theirs_s) in held_up.items():
        figures = {"value": ours_s, "unit": "s", "peer_value": theirs_s}
        record("checkpoint", case, name, peer="torch.distributed.checkpoint async_save", packages=PACKAGES, **figures)


@dataclass(frozen=True)
class Spent:
    """Duration of a save or load."""

    wall_s: float
    cpu_s: float


def measure(action: Callable[[Path], None], path: Path) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    action(path)
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def race(methods: dict[str, tuple[Callable, Callable]], folder: Path) -> dict[str, dict[str, Spent]]:
    """Return median durations of saving and loading by method."""
    runs: dict[str, list[tuple[Spent, Spent]]] = {name: [] for name in methods}
    for _ in range(NUM_ROUNDS):
        for name, (write, read) in methods.items():
            path = folder / "now"
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            written = measure(write, path)
            forget(path)
            runs[name].append((written, measure(read, path)))
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            print(f"{name:12} save {written}, load {runs[name][-1][1]}, peak {grown_kib / 1e3:+.0f} MB")
            shutil.rmtree(path)
    return {
        name: {
            metric: Spent(*(statistics.median(getattr(run[i], f) for run in spent) for f in ("wall_s", "cpu_s")))
            for i, metric in enumerate(("durable save", "cold load"))
        }
        for name, spent in runs.items()
    }


def forget(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save_ours(path: Path, plan: Plan, shard: TableShard) -> None:
    save(path, world=World.single(), step=1, plan=plan, shards=[shard], dense={}, state={})


def load_ours(path: Path, shard: TableShard) -> None:
    """Load into the table itself, whose content is equal."""
    load(path / "step-000000001", world=World.single(), shards=[shard])


def race_in_background(
    folder: Path, plan: Plan, shard: TableShard, tensors: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Return the seconds of (ours, torch) for which saves stop training: of the first, and the median of later ones."""
    background = BackgroundSaver(World.single())
    known = {"step": 1, "plan": plan, "state": {}, "then": lambda world: None}
    waits: list[tuple[float, float]] = []
    for index in range(1 + NUM_ROUNDS):
        start_s = time.perf_counter()
        background.start(folder / f"ours-{index}", shards=[shard], dense={}, **known)
        ours_s = time.perf_counter() - start_s
        background.wait()
        start_s = time.perf_counter()
        saved = dcp.async_save(tensors, checkpoint_id=folder / f"torch-{index}")
        waits.append((ours_s, time.perf_counter() - start_s))
        saved.result()
        for path in folder.iterdir():
            shutil.rmtree(path)
    later = [statistics.median(wait[i] for wait in waits[1:]) for i in (0, 1)]
    return {"held up, first save": waits[0], "held up, later save": (later[0], later[1])}


def save_distributed(path: Path, tensors: dict[str, Tensor]) -> None:
    """Save with two threads, which is fastest here. The writer syncs its files."""
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def load_distributed(tensors: dict[str, Tensor], path: Path) -> None:
    dcp.load({name: torch.empty_like(tensor) for name, tensor in tensors.items()}, checkpoint_id=path)


def save_torch(path: Path, tensors: dict[str, Tensor]) -> None:
    path.mkdir()
    torch.save(tensors, path / "table.pt")
    sync(path / "table.pt")


def load_torch(path: Path) -> None:
    torch.load(path / "table.pt", weights_only=True)


def save_numpy(path: Path, tensors: dict[str, Tensor]) -> None:
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


if __name__ == "__main__":
    main()
