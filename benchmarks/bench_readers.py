"""Measure `meseta readers` over loopback.

    python benchmarks/bench_readers.py rates [--rows 2000000]
    python benchmarks/bench_readers.py memory [--rows 2000000] [--seconds 60]
    PEER_PYTHON=/path/to/peers/bin/python python benchmarks/bench_readers.py peers [--rows 2000000]

- rates: rows/s and CPU time, compared with the local Reader and torch's DataLoader.
- memory: readers and trainers, also if a trainer is stopped for --seconds.
- peers: Parquet to tensors, compared with tf.data service and Ray Data. All have two workers and read the files eight
  times, peers after a warm-up.

Rows are synthetic. Every rank and every measurement is a separate process.
"""

from __future__ import annotations

from common.command import make_parser, run_parts
from readers.memory_part import measure_memory
from readers.peers_part import measure_peers
from readers.rates_part import measure_rates


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which a trainer is stopped")
    run_parts(parser, {"rates": measure_rates, "memory": measure_memory, "peers": measure_peers})


if __name__ == "__main__":
    main()
