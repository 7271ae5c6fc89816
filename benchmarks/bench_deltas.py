"""Compare checkpoints of changed rows with full ones and PyTorch.

    python benchmarks/bench_deltas.py bytes [--rows 2000000] [--widths 64,16] [--bits exact,8,4,3,2] [--max-chain 8]
    python benchmarks/bench_deltas.py time [--gigabytes 2] [--turns 5]
    python benchmarks/bench_deltas.py beside [--gigabytes 2] [--seconds 30] [--turns 5] [--bits exact]
    python benchmarks/bench_deltas.py marks [--workloads b_uni,c,a64_2k] [--turns 200] [--threads 2]

- bytes: bytes of 24 checkpoints with keep_last 2, written and stored at most, if 22 % of the rows change in between.
- time: seconds of a delta of 20 % of the rows until it is durable and until training continues, and a cold load of a
  chain of eight, exact and in 4 bits.
- beside: training with a rolling delta every --seconds, and without.
- marks: a step of the embedding operators with change marks, and without.

The exit code is 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deltas.beside_part import measure_beside
from deltas.bytes_part import measure_bytes
from deltas.marks_part import measure_marks
from deltas.time_part import measure_times
from record import ROOT, parse_arguments

PARTS = {"bytes": measure_bytes, "time": measure_times, "beside": measure_beside, "marks": measure_marks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="(default: all)")
    parser.add_argument("--rows", dest="num_rows", type=int, default=2_000_000)
    parser.add_argument("--widths", default="64,16", help="D of tables")
    parser.add_argument("--bits", default="exact", help="of rows in checkpoints")
    parser.add_argument("--intervals", dest="num_intervals", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.22, help="of rows that an interval touches")
    parser.add_argument("--max-chain", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a table")
    parser.add_argument("--turns", type=int, help="200 for marks, else 5")
    parser.add_argument("--seconds", type=float, default=30.0, help="between two deltas during training")
    parser.add_argument("--workloads", default="b_uni,c,a64_2k", help="of bench_ops.py, for marks")
    parser.add_argument("--threads", type=int, default=2, help="of steps, for marks")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "deltas")
    options = parse_arguments(parser)
    turns, good = options.turns, True
    for part in [options.part] if options.part else PARTS:
        options.turns = turns or (200 if part == "marks" else 5)
        good &= PARTS[part](options)
    sys.exit(not good)


if __name__ == "__main__":
    main()
