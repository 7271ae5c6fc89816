"""Rates of readers, compared with tf.data service and Ray Data, each with two workers.

The interpreter of the peers has tensorflow-cpu, ray[data], torch and pyarrow. tf.data service cannot read Parquet, so
it reads TFRecords: examples that workers parse by batch, and records of whole batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench_ingest import BATCH_SIZES
from common.processes import started
from common.timing import alternate
from peers.installed import has_module, peer_python
from record import record

from readers.rates_part import NUM_ROUNDS, SERVED, measured, prepared, reading, service

RAY = """
import glob, json, os, sys, time
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
def rows_of_an_epoch():
    files = sorted(glob.glob(sys.argv[1] + "/train/*.parquet")) * 8
    [shard] = ray.data.read_parquet(files).streaming_split(1)
    label = sys.argv[3]
    return sum(len(batch[label]) for batch in shard.iter_torch_batches(batch_size=int(sys.argv[2])))
rows_of_an_epoch()  # workers have begun
start = time.perf_counter()
num_rows = rows_of_an_epoch()
print(json.dumps([num_rows, time.perf_counter() - start]))
"""
TF_WRITE = """
import glob, sys
import numpy as np, pyarrow.parquet as pq, tensorflow as tf
data, out, num_dense = sys.argv[1], sys.argv[2], int(sys.argv[3])
def record(**features):
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
for number, path in enumerate(sorted(glob.glob(data + "/train/*.parquet"))):
    table = pq.read_table(path)
    names = table.column_names
    label = table.column(0).to_numpy().astype(np.float32)
    dense = np.stack([table.column(i).to_numpy() for i in range(1, 1 + num_dense)], 1).astype(np.float32)
    ids = np.stack([table.column(i).to_numpy() for i in range(1 + num_dense, len(names))], 1).astype(np.int32)
    with tf.io.TFRecordWriter(f"{out}/examples-{number}") as writer:
        for l, d, i in zip(label.tolist(), dense.tolist(), ids.tolist()):
            writer.write(record(
                label=tf.train.Feature(float_list=tf.train.FloatList(value=[l])),
                dense=tf.train.Feature(float_list=tf.train.FloatList(value=d)),
                ids=tf.train.Feature(int64_list=tf.train.Int64List(value=i)),
            ))
    for size in (2048, 8192):
        with tf.io.TFRecordWriter(f"{out}/raw{size}-{number}") as writer:
            for at in range(0, len(label) - size + 1, size):
                parts = (label[at:at + size], dense[at:at + size], ids[at:at + size])
                writer.write(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
"""
TF_WORKER = """
import sys, tensorflow as tf
service = tf.data.experimental.service
if sys.argv[1] == "dispatch":
    server = service.DispatchServer(service.DispatcherConfig(port=0))
    print(server.target.split("://")[1], flush=True)
else:
    server = service.WorkerServer(service.WorkerConfig(dispatcher_address=sys.argv[1]))
    print("works", flush=True)
server.join()
"""
TF_READ = """
import glob, json, sys, time
import tensorflow as tf
folder, size, kind, address = sys.argv[1], int(sys.argv[2]), *sys.argv[3:5]
num_dense, num_sparse = map(int, sys.argv[5:])
def examples():
    form = {
        "label": tf.io.FixedLenFeature([], tf.float32),
        "dense": tf.io.FixedLenFeature([num_dense], tf.float32),
        "ids": tf.io.FixedLenFeature([num_sparse], tf.int64),
    }
    return tf.data.TFRecordDataset(sorted(glob.glob(folder + "/examples-*"))).batch(size).map(
        lambda records: tf.io.parse_example(records, form), num_parallel_calls=tf.data.AUTOTUNE)
def cut(record):
    whole = tf.io.decode_raw(record, tf.int32)
    dense_end = size * (1 + num_dense)
    return {
        "label": tf.bitcast(whole[:size], tf.float32),
        "dense": tf.reshape(tf.bitcast(whole[size:dense_end], tf.float32), [size, num_dense]),
        "ids": tf.cast(tf.reshape(whole[dense_end:], [size, num_sparse]), tf.int64),
    }
def raw():
    return tf.data.TFRecordDataset(sorted(glob.glob(f"{folder}/raw{size}-*"))).map(
        cut, num_parallel_calls=tf.data.AUTOTUNE)
def rows_of_an_epoch():
    policy = tf.data.experimental.service.ShardingPolicy.DYNAMIC
    served = tf.data.experimental.service.distribute(policy, "grpc://" + address)
    made = (examples() if kind == "examples" else raw()).repeat(8).apply(served).prefetch(tf.data.AUTOTUNE)
    return sum(int(batch["label"].shape[0]) for batch in made)
rows_of_an_epoch()
start = time.perf_counter()
num_rows = rows_of_an_epoch()
print(json.dumps([num_rows, time.perf_counter() - start]))
"""


def rows_per_s(python: str, program: str, *arguments: str) -> float:
    """Run a program that prints [rows, seconds] and return its rate. Raises RuntimeError if it fails."""
    done = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    num_rows, seconds = json.loads(done.stdout.strip().splitlines()[-1])
    return num_rows / seconds


def measure_peers(options: argparse.Namespace) -> bool:
    python = peer_python()
    with prepared(options.rows) as data, tempfile.TemporaryDirectory() as records, ExitStack() as stack:
        peers: dict[str, Callable[[int], float]] = {}
        if has_module(python, "ray.data"):
            peers["Ray Data"] = lambda size: rows_per_s(python, RAY, data, str(size), "label")
        if has_module(python, "tensorflow"):
            described = json.loads(Path(data, "dataset.json").read_text())
            sizes = [str(len(described[kind])) for kind in ("dense", "sparse")]
            subprocess.run([python, "-c", TF_WRITE, data, records, sizes[0]], check=True, stderr=subprocess.DEVNULL)

            def serve(what: str) -> str:
                server = stack.enter_context(started([python, "-c", TF_WORKER, what], stderr=subprocess.DEVNULL))
                return server.first_line

            address = serve("dispatch")
            for _ in range(2):
                serve(address)
            for kind in ("examples", "raw"):
                peers[f"tf.data service, {kind}"] = lambda size, kind=kind: rows_per_s(
                    python, TF_READ, records, str(size), kind, address, *sizes
                )
        if not peers:
            print(f"{python} has neither ray.data nor tensorflow, so peers are left out")
        url = stack.enter_context(service(data))
        for batch_size in BATCH_SIZES:
            compare(f"{options.rows} rows", [data, url], batch_size, peers)
    return True


def compare(case: str, arguments: list[str], batch_size: int, peers: dict[str, Callable[[int], float]]) -> None:
    calls = {"served": lambda: measured(reading(SERVED, batch_size), arguments)[0]}
    calls |= {name: partial(peer, batch_size) for name, peer in peers.items()}
    rates = {name: statistics.median(values) for name, values in alternate(calls, NUM_ROUNDS).items()}
    for name in peers:
        what = f"batches of {batch_size}, 2 workers"
        record("readers", case, what, rates["served"], "rows/s", peer=name, peer_value=rates[name])
