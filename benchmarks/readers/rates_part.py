"""Rates and CPU time of readers, compared with the local Reader and torch's DataLoader."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from bench_ingest import BATCH_SIZES, PEERS, SYNTH
from common.processes import MESETA, run_meseta, started
from common.timing import alternate
from record import record

NUM_ROUNDS, NUM_READERS = 3, 2
NUM_EPOCHS = 8
"""Number of epochs per rank. It is large, because the first batches take about 90 ms longer."""
READERS = (*MESETA, "readers")

MEASURE = """
import json, resource, sys, time
def processor_s():
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in used)
{setup}
start, used = time.perf_counter(), processor_s()
{run}
elapsed = time.perf_counter() - start
print(json.dumps([num_rows, elapsed, processor_s() - used]))
"""
OURS = """
import torch; torch.set_num_threads(1)
from meseta.ops.allocator import keep_freed_memory
keep_freed_memory()  # as training does
from meseta.data import Reader, ReaderOptions
from meseta.data.service.client.reader import ReaderServiceAddress, RunAttempt, ServedReader
rank, num_ranks = int(sys.argv[3]), int(sys.argv[4])
options = ReaderOptions(batch_size=BATCH, shuffle=SHUFFLE)
"""
LOCAL = "reader = Reader(sys.argv[1], 'train', options, rank=rank, num_ranks=num_ranks)"
SERVED = (
    "reader = ServedReader(ReaderServiceAddress(url=sys.argv[2]), 'train', options, rank=rank, "
    "num_ranks=num_ranks, run=RunAttempt(name=sys.argv[5], attempt=0))"
)
READ = f"num_rows = sum(batch.batch_size for batch in reader.epochs({NUM_EPOCHS} * num_ranks))"


@contextmanager
def dispatcher(data: str) -> Iterator[str]:
    command = [*READERS, "dispatch", "--data", data, "--listen", "127.0.0.1:0", "--json"]
    with started(command) as server:
        yield json.loads(server.first_line)["url"]


@contextmanager
def service(data: str) -> Iterator[str]:
    """Context manager that starts a dispatcher and readers, and yields its URL."""
    with ExitStack() as stack:
        url = stack.enter_context(dispatcher(data))
        for _ in range(NUM_READERS):
            stack.enter_context(started([*READERS, "work", "--dispatcher", url]))
        yield url


def reading(how: str, batch_size: int, *, shuffle: bool = False) -> tuple[str, str]:
    """Return the setup and the program that reads by `how`, which is LOCAL or SERVED."""
    return f"{OURS.replace('BATCH', str(batch_size)).replace('SHUFFLE', str(shuffle))}\n{how}", READ


def measured(code: tuple[str, str], arguments: list[str], num_ranks: int = 1) -> tuple[float, float]:
    """Return (rows/s of all ranks, CPU nanoseconds per row and rank)."""
    program = MEASURE.format(setup=code[0], run=code[1])
    run = f"bench-{time.time_ns()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments, str(rank), str(num_ranks), run],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    results = [json.loads(rank.communicate()[0]) for rank in ranks]
    rows = sum(result[0] for result in results)
    return rows / max(result[1] for result in results), sum(result[2] for result in results) / rows * 1e9


@contextmanager
def prepared(num_rows: int) -> Iterator[str]:
    """Context manager that yields the folder of a dataset of synthetic rows."""
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as folder:
        subprocess.run([sys.executable, "-c", SYNTH, f"{folder}/raw", str(num_rows)], check=True)
        run_meseta("prepare", f"{folder}/raw/*.tsv", "--out", f"{folder}/data")
        yield f"{folder}/data"


def measure_rates(options: argparse.Namespace) -> bool:
    with prepared(options.rows) as data, service(data) as url:
        for batch_size in BATCH_SIZES:
            for shuffle in (False, True):
                compare(f"{options.rows} rows", [data, url], batch_size, shuffle=shuffle)
    return True


def compare(case: str, arguments: list[str], batch_size: int, *, shuffle: bool) -> None:
    codes = {
        (name, num_ranks): reading(how, batch_size, shuffle=shuffle)
        for num_ranks in (1, 4)
        for name, how in (("served", SERVED), ("local", LOCAL))
    }
    if not shuffle:
        setup, run = PEERS["DataLoader, 2 workers"]
        codes["DataLoader, 2 workers", 1] = (setup.replace("BATCH", str(batch_size)), run)
    calls = {key: partial(measured, code, arguments, key[1]) for key, code in codes.items()}
    results = alternate(calls, NUM_ROUNDS)
    speed = {key: statistics.median(rows for rows, _ in values) for key, values in results.items()}
    used = {key: statistics.median(ns for _, ns in values) for key, values in results.items()}
    what = f"batches of {batch_size}" + ", shuffled" * shuffle
    for (name, num_ranks), value in speed.items():
        if name != "served":
            ours = speed["served", num_ranks]
            record("readers", case, f"{what}, {num_ranks} ranks", ours, "rows/s", peer=name, peer_value=value)
    for num_ranks in (1, 4):
        record("readers", case, f"processor, {what}, {num_ranks} ranks", used["served", num_ranks], "ns/row",
               peer="local", peer_value=used["local", num_ranks])  # fmt: skip
