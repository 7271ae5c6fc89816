"""Measure tables on disk.

    python benchmarks/bench_tiers.py stores [--gigabytes 4] [--widths 260] [--limit-mb 1024] [--folder DIR]
    python benchmarks/bench_tiers.py misses [--batches 2000]
    python benchmarks/bench_tiers.py save [--rows 16000000] [--passes 5] [--seconds 30]
    python benchmarks/bench_tiers.py large [--rows 64000000] [--limit-mb 4096] [--disk-gb 60]
    python benchmarks/bench_tiers.py train [--trainings d16_2k,d64_2k] [--max-reads-per-s 20000] [--folder DIR]
    python benchmarks/bench_tiers.py mapped [--trainings d16_2k,d64_2k] [--folder DIR]
    python benchmarks/bench_tiers.py predict [--tasks 10] [--seed 0] [--folder DIR]
    python benchmarks/bench_tiers.py nodes [--models F,I]

- stores: memmap with MADV_RANDOM, LMDB and RocksDB with direct reads, each in a memory control group, read by one
  process and by sixteen. `pip install lmdb rocksdict`.
- misses: cache misses with Zipf ids on the large tables of Criteo / 16, compared with LRU, LFU and Belady.
- save: saves and loads of randomly written rows, alone and during training, compared with the disk.
- large: a table larger than memory through training and other commands, in control groups of --limit-mb.
- train: steps of bench_e2e.py with 20 % (d64: 15 %) of all tables cached, compared with memory. Long bags (rm1, rm2)
  are limited by the disk: `--warm 40000 --steps 6 --turns 3`.
- mapped: the same, compared with plain PyTorch on mapped files with equal memory.
- predict: predicted and measured misses and steps of random tasks.
- nodes: the smallest clusters for published models with and without disks. Modeled, not measured.

DIR must be on the measured disk. The exit code is 1 if a requirement is missed.
"""

from __future__ import annotations

from pathlib import Path

from common.command import make_parser, run_parts
from record import ROOT
from tiers.large_part import measure_large
from tiers.mapped_part import measure_mapped
from tiers.misses_part import measure_misses
from tiers.nodes_part import measure_nodes
from tiers.predict_part import measure_predictions
from tiers.save_part import measure_saves
from tiers.stores_part import measure_stores
from tiers.train_part import WARM_IDS, measure_training

PARTS = {
    "stores": measure_stores,
    "misses": measure_misses,
    "save": measure_saves,
    "large": measure_large,
    "train": measure_training,
    "mapped": measure_mapped,
    "predict": measure_predictions,
    "nodes": measure_nodes,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of rows in a file")
    parser.add_argument("--widths", default="260", help="bytes of a row with its state")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--limit-mb", type=int, default=1024, help="memory of each store")
    parser.add_argument("--batches", dest="num_batches", type=int, default=2000, help="of 2,048 samples, for misses")
    parser.add_argument("--rows", dest="num_rows", type=int, default=16_000_000, help="of a table that is saved")
    parser.add_argument("--disk-gb", type=float, default=60.0, help="maximum disk space of `large`")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training during saves")
    parser.add_argument("--trainings", default="d16_2k,d64_2k", help="of bench_e2e.py")
    parser.add_argument("--max-reads-per-s", type=float, help="of training (default: unlimited)")
    parser.add_argument("--warm", dest="num_warm", type=int, default=WARM_IDS, help="samples that fill the cache")
    parser.add_argument("--steps", dest="num_steps", type=int, default=60, help="of a turn of training")
    parser.add_argument("--turns", dest="num_turns", type=int, default=5, help="of training")
    parser.add_argument("--tasks", dest="num_tasks", type=int, default=10, help="random ones, for predict")
    parser.add_argument("--seed", type=int, default=0, help="of the first of these tasks")
    parser.add_argument("--models", default="F,I", help="of published_models.py, for nodes")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tiers")
    run_parts(parser, PARTS)


if __name__ == "__main__":
    main()
