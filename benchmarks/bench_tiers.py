"""Tables that lie on a disk: the engine that reads and writes their rows.

    python benchmarks/bench_tiers.py engine [--gigabytes 4] [--widths 68,260,1032] [--engine auto] [--folder DIR]
        [--passes 5] [--reads 100000] [--no-record]
    python benchmarks/bench_tiers.py stores [--gigabytes 4] [--widths 260] [--limit-mb 1024] [--folder DIR]
    python benchmarks/bench_tiers.py misses [--batches 2000]
    python benchmarks/bench_tiers.py save [--rows 16000000] [--passes 5] [--seconds 30]
    python benchmarks/bench_tiers.py large [--rows 64000000] [--limit-mb 4096] [--disk-gb 60]
    python benchmarks/bench_tiers.py train [--trainings d16_2k,d64_2k] [--max-reads-per-s 20000] [--folder DIR]
    python benchmarks/bench_tiers.py mapped [--trainings d16_2k,d64_2k] [--folder DIR]
    python benchmarks/bench_tiers.py predict [--tasks 10] [--seed 0] [--folder DIR]
    python benchmarks/bench_tiers.py nodes [--models F,I]

Parts:
- engine: rows at random beside a bare loop of C at its best depth, which reads the blocks of the same file: reads a
  second, processor time of one, bytes read per row, and p50 and p99 of reads at 25, 50 and 75 % load. Both take turns;
  a virtual machine's host may hold the file, so each line says which pass it is of, and medians leave out the first.
- stores: the same rows in numpy.memmap with MADV_RANDOM, LMDB and RocksDB with direct reads, beside ours, each in a
  memory control group of its own: reading alone, and with as many rows written back; by one process, as in training,
  and by sixteen, which is the most that the others give. `pip install lmdb rocksdict`.
- misses: which rows lie near, on the large tables of Criteo over 16 with ids by Zipf's law, 10 % of rows near, first
  touches left out; beside exact LRU, LFU and Belady on the same ids, where popular rows stay what they are, and where
  others follow; and what evaluations in between add.
- save: saves and loads of a table of which each row was written at random, alone and beside training, beside the disk
  that writes a file in order and reads it; and the memory that they take beside the near rows.
- large: a table larger than memory through `meseta train`, its resumption, `eval`, `predict`, `checkpoint verify` and
  `checkpoint export`, each in a control group of --limit-mb; and the seconds that it takes to make it.
- train: steps of the trainings of `meseta bench e2e` whose tables all lie on a disk, 20 % (d64: 15 %) of their bytes
  near and each row written before, beside the same in memory, and beside the larger of what reads take the disk and
  what they cost processors. Long bags (rm1, rm2) are bound by the disk: `--warm 40000 --steps 6 --turns 3`.
- mapped: the same beside plain PyTorch with row-wise Adagrad by index operations, whose rows and sums are files mapped
  into memory with MADV_RANDOM, in a control group of as much memory as ours takes for rows, and what the process takes
  beside them.
- predict: what the planner says of misses and steps of random tasks whose tables lie in several tiers, rows all written
  before, beside what they take; and the near bytes that it advises beside five others.
- nodes: the fewest hosts on which published models take no more than 1.1 times the step of the published cluster, with
  and without disks, each host with its part of the batch. Modelled by documented constants; nothing is measured.

DIR is to be on the disk that is measured. Appends to benchmarks/results.csv. Exits with 1 where a part misses what it
must reach: 0.9 of the loop's reads a second, 1.3 times its processor time, 3 times the best store where one process
reads, 3 times PyTorch on mapped tables, 0.85 times the misses of LRU, and 1.05 times those of the better of LRU and
LFU where popular rows change, 1.05 times those without evaluations in between, 0.6 of the disk's rate for saves and
loads, 0.25 beside training and 0.8 of that, and 512 MB; misses 20 % and steps 25 % off what was predicted, 1.1 times
the best step of five near sizes; four times fewer hosts where capacity binds, and no fewer where lookups do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from record import ROOT
from tiers.engine_part import EngineOptions, measure_engine
from tiers.large_part import LargeOptions, measure_large
from tiers.mapped_part import measure_mapped
from tiers.misses_part import MissOptions, measure_misses
from tiers.nodes_part import NodeOptions, measure_nodes
from tiers.predict_part import PredictOptions, measure_predictions
from tiers.save_part import SaveOptions, measure_saves
from tiers.stores_part import StoreOptions, measure_stores
from tiers.train_part import WARM_IDS, TrainOptions, measure_training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("engine", "stores", "misses", "save", "large", "train", "mapped", "predict", "nodes")
    parser.add_argument("part", choices=parts)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of rows in a file")
    parser.add_argument("--widths", default="68,260,1032", help="bytes of a row with its state")
    parser.add_argument("--engine", default="auto", help="io_uring or threads")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--reads", type=int, default=100_000, help="of a pass")
    parser.add_argument("--limit-mb", type=int, default=1024, help="memory of each store")
    parser.add_argument("--batches", type=int, default=2000, help="of 2,048 samples, for misses")
    parser.add_argument("--rows", type=int, default=16_000_000, help="of a table that is saved")
    parser.add_argument("--disk-gb", type=float, default=60.0, help="that `large` may use at a time")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training beside saves")
    parser.add_argument("--max-mb-per-s", default="", help="limits of saves beside training, such as 100,200")
    parser.add_argument("--trainings", default="d16_2k,d64_2k", help="of `meseta bench e2e`")
    parser.add_argument("--max-reads-per-s", type=float, help="of training; none: as many as the disk gives")
    parser.add_argument("--warm", type=int, default=WARM_IDS, help="samples that fill slots before the clock starts")
    parser.add_argument("--steps", type=int, default=60, help="of a turn of training")
    parser.add_argument("--turns", type=int, default=5, help="of training")
    parser.add_argument("--tasks", type=int, default=10, help="random ones, for predict")
    parser.add_argument("--seed", type=int, default=0, help="of the first of these tasks")
    parser.add_argument("--models", default="F,I", help="of published_models.py, for nodes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tiers")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.csv as it is")
    told = parser.parse_args()
    widths, keep = tuple(map(int, told.widths.split(","))), not told.no_record
    if told.part == "engine":
        good = measure_engine(
            EngineOptions(told.folder, told.gigabytes, widths, told.engine, told.passes, told.reads, keep)
        )
    elif told.part == "misses":
        good = measure_misses(MissOptions(told.batches, keep))
    elif told.part == "large":
        good = measure_large(LargeOptions(told.folder, told.rows, told.limit_mb, told.disk_gb, keep))
    elif told.part == "save":
        rates = tuple(float(rate) * 1e6 for rate in told.max_mb_per_s.split(",") if rate)
        good = measure_saves(SaveOptions(told.folder, told.rows, told.passes, told.seconds, keep, rates))
    elif told.part in ("train", "mapped"):
        options = TrainOptions(
            told.folder, tuple(told.trainings.split(",")), told.max_reads_per_s, told.warm, told.steps, told.turns, keep
        )
        good = measure_training(options) if told.part == "train" else measure_mapped(options)
    elif told.part == "predict":
        good = measure_predictions(PredictOptions(told.folder, told.tasks, told.seed, keep))
    elif told.part == "nodes":
        good = measure_nodes(NodeOptions(tuple(told.models.split(",")), keep))
    else:
        good = measure_stores(StoreOptions(told.folder, told.gigabytes, widths, told.limit_mb, keep))
    sys.exit(not good)


if __name__ == "__main__":
    main()
