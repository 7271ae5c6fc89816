"""A save of four hosts straight to an S3 server, beside one in which rank 0 writes all blocks.

    python benchmarks/bench_store.py [size_mb] [--rate 100mbit] [--rounds 3] [--no-record]

Four ranks hold one table with the state of its row optimizer, cut by rows, each on a host whose link lets `rate`
through in either direction; the server is moto's, on a host with a link of 10 Gbit/s. The peer is the same save with
every block written by rank 0, to which the other ranks send their rows over the same links. A save ends with its
manifest; both are then read back and checked. They take turns. Needs network namespaces, see docs/testbed.md. Appends
to benchmarks/results.csv, and exits with 1 where four ranks take more than 0.35 of the time of one.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hosts.links import address
from record import record

from hosts import Hosts, why_impossible

NUM_RANKS = 4
LIMIT = 0.35
WIDTH = 64
PORT = 5000
ALONE = "rank 0 alone"
DONE = "BENCH_STORE_DONE"
"""Names a file that appears when the server is needed no more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size_mb", type=int, nargs="?", default=256)
    parser.add_argument("--rate", default="100mbit", help="of the link of each rank's host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return serve() if int(os.environ["RANK"]) == NUM_RANKS else save_in_turns(options.size_mb, options.rounds)
    if (why := why_impossible()) is not None:
        print(f"left out, since this machine makes no slow links: {why}")
        return 0
    done = Path("/dev/shm") / f"meseta-bench-store-{os.getpid()}"
    s3 = {"AWS_ENDPOINT_URL": f"http://{address(NUM_RANKS)}:{PORT}", "AWS_DEFAULT_REGION": "us-east-1"}
    s3 |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", DONE: str(done)}
    try:
        with Hosts(NUM_RANKS + 1, across=options.rate) as hosts:
            hosts.widen(NUM_RANKS, "10gbit")
            outcome = hosts.run([sys.executable, *sys.argv], variables=s3)
    finally:
        done.unlink(missing_ok=True)
    times = dict(line.split(": ") for line in outcome.outputs[0].splitlines() if ": " in line)
    together_s, alone_s = (statistics.median(map(float, times[name].split())) for name in ("four ranks", ALONE))
    case = f"{options.size_mb}MB_{options.rate}"
    print(f"four ranks {times['four ranks']} s; {ALONE} {times[ALONE]} s; ratio {together_s / alone_s:.3f}")
    if not options.no_record:
        packages = ("torch", "s3fs", "moto")
        record("store", case, "save", together_s, "s", peer=ALONE, peer_value=alone_s, packages=packages)
    return int(together_s > LIMIT * alone_s)


def serve() -> int:
    """Moto's S3 server, until the ranks have ended."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="0.0.0.0", port=PORT, verbose=False)
    server.start()
    while not Path(os.environ[DONE]).exists():
        time.sleep(0.1)
    server.stop()
    return 0


def save_in_turns(size_mb: int, num_rounds: int) -> int:
    """As one of the ranks; rank 0 prints the seconds of every save."""
    os.environ["WORLD_SIZE"] = str(NUM_RANKS)
    import torch

    from meseta.checkpoint import prune, save, saving, verify
    from meseta.comm import World
    from meseta.optim import make_row_optimizer
    from meseta.spec import Plan, TableSpec
    from meseta.storage import TableShard
    from meseta.system.remote import to_location

    world = World.current()
    spec = TableSpec(name="table", num_embeddings=size_mb * 1_000_000 // (WIDTH * 4 + 4), embedding_dim=WIDTH)
    plan = Plan.from_dict({"tables": {"table": "row_wise"}}, [spec], NUM_RANKS)
    optimizer = make_row_optimizer(spec.optimizer)
    [shard] = [shard for shard in plan["table"].shards if world.rank in shard.ranks]
    weight = torch.rand(shard.num_rows, WIDTH)
    held = TableShard(spec=spec, shard=shard, weight=weight, state=optimizer.init(weight), optimizer=optimizer)
    if world.rank == 0:
        make_bucket()
    really = saving._assign_jobs

    def by_rank_0(*arguments: Any) -> list[Any]:
        return [replace(job, writer=0) for job in really(*arguments)]

    times: dict[str, list[float]] = {"four ranks": [], ALONE: []}
    checksums = set()
    for turn in range(2 * num_rounds):
        name = ALONE if turn % 2 else "four ranks"
        with mock.patch.object(saving, "_assign_jobs", by_rank_0 if turn % 2 else really):
            world.barrier()
            start_s = time.perf_counter()
            known: dict[str, Any] = {"step": turn + 1, "plan": plan, "dense": {}, "state": {}}
            path = save("s3://bucket/run", world=world, shards=[held], **known)
            times[name].append(time.perf_counter() - start_s)
        if turn < 2:
            world.run_on_rank_0(lambda path=path: checksums.add(verify(path)))  # type: ignore[misc]
        world.run_on_rank_0(lambda: prune(to_location("s3://bucket/run"), keep_last=1))
    if world.rank == 0:
        assert len(checksums) == 1
        for name, seconds in times.items():
            print(f"{name}: {' '.join(f'{s:.2f}' for s in seconds)}")
        Path(os.environ[DONE]).touch()
    return 0


def make_bucket() -> None:
    """Once the server is there."""
    import boto3

    client = boto3.client("s3")
    for _ in range(300):
        try:
            client.create_bucket(Bucket="bucket")
            return
        except Exception:
            time.sleep(0.2)
    raise SystemExit("the server did not answer within 60 s")


if __name__ == "__main__":
    raise SystemExit(main())
