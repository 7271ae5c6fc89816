"""Measure checkpoints.

    python benchmarks/bench_checkpoint.py full [--gigabytes 2] [--turns 5]
    python benchmarks/bench_checkpoint.py memory [--sizes 1,3] [--only TEXT]
    python benchmarks/bench_checkpoint.py bytes [--rows 2000000] [--widths 64,16] [--bits exact,8,4,3,2] [--max-chain 8]
    python benchmarks/bench_checkpoint.py time [--gigabytes 2] [--turns 5]
    python benchmarks/bench_checkpoint.py training [--gigabytes 2] [--seconds 30] [--turns 5] [--bits exact]
    python benchmarks/bench_checkpoint.py marks [--workloads b_uni,c,a64_2k] [--mark-turns 200] [--threads 2]

- full: durable saves and cold loads, and the pause of training by a background save ("held up"). Saves end with fsync,
  loads start with an empty page cache. Only Meseta computes and verifies SHA-256. "the disk alone" is the limit: direct
  transfers of 16 MB, two at a time.
- memory: peak anonymous memory of every operation on a run with one table of 64 columns and row-wise Adagrad, for all
  policies of checkpoint.deltas and all tiers. Each runs in a separate process, whose RssAnon is sampled every 3 ms. Of
  save and resume, the peak above that of training counts, of import the peak above that of the new model, of predict
  the process without its tables. Results are stored in the folder, and the same command continues with missing ones.
- bytes: bytes of 24 checkpoints with keep_last 2, written and stored at most, if 22 % of the rows change in between.
- time: seconds of a delta of 20 % of the rows until it is durable and until training continues, and a cold load of a
  chain of eight, exact and in 4 bits.
- training: steps with a rolling delta every --seconds, and without.
- marks: a step of the embedding operators with change marks, and without.

--folder must be on the measured disk. The exit code is 1 if a requirement is missed.
"""

from __future__ import annotations

from pathlib import Path

from checkpoints.bytes_part import measure_bytes
from checkpoints.full_part import measure_full
from checkpoints.marks_part import measure_marks
from checkpoints.memory_part import measure_memory
from checkpoints.time_part import measure_times
from checkpoints.training_part import measure_training
from common.command import make_parser, run_parts
from record import ROOT


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", dest="num_rows", type=int, default=2_000_000)
    parser.add_argument("--widths", default="64,16", help="D of tables")
    parser.add_argument("--bits", default="exact", help="of rows in checkpoints")
    parser.add_argument("--intervals", dest="num_intervals", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.22, help="of rows that an interval touches")
    parser.add_argument("--max-chain", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a table")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="between two deltas during training")
    parser.add_argument("--workloads", default="b_uni,c,a64_2k", help="of bench_ops.py, for marks")
    parser.add_argument("--mark-turns", type=int, default=200, help="of marks")
    parser.add_argument("--threads", type=int, default=2, help="of steps, for marks")
    parser.add_argument("--sizes", default="1,3", help="GB of tables, for memory")
    parser.add_argument("--only", default="", help="runs of memory with a case whose name contains this")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "checkpoints")
    parts = {
        "full": measure_full,
        "memory": measure_memory,
        "bytes": measure_bytes,
        "time": measure_times,
        "training": measure_training,
        "marks": measure_marks,
    }
    run_parts(parser, parts)


if __name__ == "__main__":
    main()
