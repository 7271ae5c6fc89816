"""Batches from `meseta readers` over loopback, two readers, beside our own local Reader and torch's DataLoader with two
workers: rows a second, the processor time of trainers, and bytes on the wire.

    python benchmarks/bench_readers.py [num_rows] [--keys] [--bytes]

Default 2,000,000 rows, synthetic. --keys: encrypted, with tokens. --bytes: nothing but the bytes on the wire. Every
measurement is a process of its own, or one for each rank; cases take turns. Appends to
benchmarks/results.csv. tf.data service and Ray Data stand beside it in bench_reader_peers.py.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench_ingest import PEERS, SYNTH
from record import record

NUM_ROUNDS = 3
BATCH_SIZES = (2048, 8192)
NUM_READERS = 2
MESETA = [sys.executable, "-m", "meseta.cli.main"]
NUM_EPOCHS = 8
"""Times the number of ranks: each process reads as many rows, enough that what its first batches cost, about 90 ms,
does not count."""

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
from pathlib import Path
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
    "reader = ServedReader(ReaderServiceAddress(url=sys.argv[2], keys=KEYS), 'train', options, rank=rank, "
    "num_ranks=num_ranks, run=RunAttempt(name=sys.argv[5], attempt=0))"
)
READ = f"num_rows = sum(batch.batch_size for batch in reader.epochs({NUM_EPOCHS} * num_ranks))"


@contextmanager
def tier(data: str, keys: str | None) -> Iterator[str]:
    """A dispatcher and its readers; the URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    url = f"grpc{'' if keys is None else '+tls'}://{place}"
    meseta, shown = [*MESETA, "readers"], [] if keys is None else ["--keys", keys]
    commands = [["dispatch", "--data", data, "--listen", place, *shown]]
    commands += [["work", "--dispatcher", url, *shown]] * NUM_READERS
    processes = []
    try:
        for command in commands:
            processes.append(subprocess.Popen([*meseta, *command], stdout=subprocess.PIPE, text=True))
            assert processes[-1].stdout is not None and processes[-1].stdout.readline()
        yield url
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(code: tuple[str, str], arguments: list[str], num_ranks: int = 1) -> tuple[float, float]:
    """(rows per second of all ranks, nanoseconds of the processor per row and rank)."""
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


def loopback_bytes() -> int:
    """That have been sent on this machine's loopback."""
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def prepared(folder: str, num_rows: int) -> str:
    """A synthetic dataset, made in a folder."""
    raw, data = f"{folder}/raw", f"{folder}/data"
    subprocess.run([sys.executable, "-c", SYNTH, raw, str(num_rows)], check=True)
    prepare = [*MESETA, "prepare", f"{raw}/*.tsv", "--out", data]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("num_rows", nargs="?", default="2_000_000")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    asked = parser.parse_args()
    num_rows, case = int(asked.num_rows), f"{int(asked.num_rows)} rows" + ", encrypted" * asked.keys
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as folder:
        data, keys = prepared(folder, num_rows), f"{folder}/keys" if asked.keys else None
        if keys is not None:
            subprocess.run([*MESETA, "readers", "keys", keys], check=True, stdout=subprocess.DEVNULL)
        served = SERVED.replace("KEYS", "None" if keys is None else f"Path({keys!r})")
        with tier(data, keys) as url:
            for batch_size in () if asked.bytes else BATCH_SIZES:
                for shuffle in (False, True):
                    compare(case, served, [data, url], batch_size, shuffle=shuffle)
            measure_bytes(case, served, data, url)


def compare(case: str, served: str, arguments: list[str], batch_size: int, *, shuffle: bool) -> None:
    """Rows a second and processor time, in turns."""
    setup = OURS.replace("BATCH", str(batch_size)).replace("SHUFFLE", str(shuffle))
    ways = {"served": (f"{setup}\n{served}", READ), "local": (f"{setup}\n{LOCAL}", READ)}
    cases = {(name, num_ranks): code for num_ranks in (1, 4) for name, code in ways.items()}
    if not shuffle:
        peer = PEERS["DataLoader, 2 workers"]
        cases["DataLoader, 2 workers", 1] = (peer[0].replace("BATCH", str(batch_size)), peer[1])
    found = {key: [] for key in cases}
    for _ in range(NUM_ROUNDS):
        for (name, num_ranks), code in cases.items():
            found[name, num_ranks].append(measured(code, arguments, num_ranks))
    speed = {key: statistics.median(rows for rows, _ in results) for key, results in found.items()}
    used = {key: statistics.median(ns for _, ns in results) for key, results in found.items()}
    what = f"batches of {batch_size}" + ", shuffled" * shuffle
    for (name, num_ranks), value in speed.items():
        if name != "served":
            ours = speed["served", num_ranks]
            record("readers", case, f"{what}, {num_ranks} ranks", ours, "rows/s", peer=name, peer_value=value)
    for num_ranks in (1, 4):
        record("readers", case, f"processor, {what}, {num_ranks} ranks", used["served", num_ranks], "ns/row",
               peer="local", peer_value=used["local", num_ranks])  # fmt: skip


def measure_bytes(case: str, served: str, data: str, url: str) -> None:
    """What an epoch of four ranks sends, beside its Arrow data."""
    from meseta.data import Dataset

    setup, num_ranks = OURS.replace("BATCH", "8192").replace("SHUFFLE", "True"), 4
    before = loopback_bytes()
    measured((f"{setup}\n{served}", READ), [data, url], num_ranks)
    sent = loopback_bytes() - before
    dataset = Dataset.load(data)
    row_bytes = 4 * (1 + len(dataset.dense) + len(dataset.sparse))  # ids are int32
    plain = NUM_EPOCHS * num_ranks * dataset.splits["train"].num_rows * row_bytes
    record("readers", case, f"bytes of {num_ranks} ranks", sent, "bytes", peer="Arrow data", peer_value=plain)


if __name__ == "__main__":
    main()
