"""Durable save and cold load of one table with optimizer state, beside torch.save and numpy in the same run.

    python benchmarks/bench_checkpoint.py [size_mb]

Everything is written to the directory for temporary files (TMPDIR), which should be a disk and not memory. A save ends
when the data are on the disk (fsync), a load begins with none of them in memory (posix_fadvise). Ours also takes and
checks SHA-256 sums, which the peers do not. Runs the correctness test first and reports nothing when it fails. Appends
to benchmarks/results.csv.
"""

import csv
import datetime
import importlib.metadata
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meseta.checkpoint import load, save
from meseta.comm import World
from meseta.optim import make_row_optimizer
from meseta.spec import Plan, TableSpec
from meseta.storage import TableShard

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ["date", "commit", "benchmark", "case", "metric", "value", "unit", "peer", "ratio", "hardware", "versions"]
NUM_ROUNDS = 3
WIDTH = 64


def main() -> None:
    size_mb = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    test = str(ROOT / "tests/checkpoint/test_round_trip.py")
    subprocess.run([sys.executable, "-m", "pytest", test], check=True, cwd=ROOT)
    spec = TableSpec(name="table", num_embeddings=size_mb * 1_000_000 // (WIDTH * 4 + 4), embedding_dim=WIDTH)
    plan = Plan.from_dict({"tables": {"table": "table_wise"}}, [spec], 1)
    optimizer = make_row_optimizer(spec.optimizer, WIDTH)
    weight = torch.rand(spec.num_embeddings, WIDTH)
    shard = TableShard(
        spec=spec, shard=plan["table"].shards[0], weight=weight, state=optimizer.init(weight), optimizer=optimizer
    )
    tensors = {"row": shard.weight, **shard.state}
    methods = {
        "meseta": (lambda path: save_ours(path, plan, shard), lambda path: load_ours(path, shard)),
        "torch.save": (lambda path: save_torch(path, tensors), load_torch),
        "numpy.save": (lambda path: save_numpy(path, tensors), load_numpy),
    }
    with tempfile.TemporaryDirectory() as folder:
        saves, loads = race(methods, Path(folder))
    num_mb = sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6
    case = f"{num_mb:.0f} MB, {spec.num_embeddings} x {WIDTH}"
    for metric, seconds in (("durable save", saves), ("cold load", loads)):
        for peer in ("torch.save", "numpy.save"):
            report(metric, case, num_mb / seconds["meseta"], num_mb / seconds[peer], peer)


def race(methods: dict[str, tuple[Callable, Callable]], folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of saving and of loading, by method; interleaved, ours first, each save on a fresh path."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in methods}
    for _ in range(NUM_ROUNDS):
        for name, (write, read) in methods.items():
            path = folder / "now"
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for step, spent in zip((write, read), times[name], strict=True):
                start = time.perf_counter()
                step(path)
                spent.append(time.perf_counter() - start)
                forget(path)
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            spent_s = [spent[-1] for spent in times[name]]
            print(f"{name:12} save {spent_s[0]:.2f} s, load {spent_s[1]:.2f} s, peak {grown_kib / 1e3:+.0f} MB")
            shutil.rmtree(path)
    saves, loads = ({name: statistics.median(spent[i]) for name, spent in times.items()} for i in range(2))
    return saves, loads


def forget(path: Path) -> None:
    """Drop the files from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save_ours(path: Path, plan: Plan, shard: TableShard) -> None:
    save(path, world=World.single(), step=1, plan=plan, shards=[shard], dense={}, state={})


def load_ours(path: Path, shard: TableShard) -> None:
    """Into the table itself: its sums are checked, so it stays what it was."""
    load(path / "step-000000001", world=World.single(), shards=[shard])


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


def sync(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def report(metric: str, case: str, ours_mb_s: float, peer_mb_s: float, peer: str) -> None:
    """Print one comparison and append it to the results."""
    print(f"{metric:12} {case}: {ours_mb_s:.0f} MB/s; {peer} {peer_mb_s:.0f} MB/s; ratio {ours_mb_s / peer_mb_s:.2f}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "pyarrow"))
    row = [
        datetime.date.today().isoformat(),
        commit.stdout.strip(),
        "checkpoint",
        case,
        metric,
        f"{ours_mb_s:.0f}",
        "MB/s",
    ]
    row += [f"{peer} {peer_mb_s:.0f} MB/s", f"{ours_mb_s / peer_mb_s:.2f}", hardware()]
    row += [f"python {platform.python_version()} {versions}"]
    path = ROOT / "benchmarks" / "results.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([COLUMNS, row] if is_new else [row])


def hardware() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()


if __name__ == "__main__":
    main()
