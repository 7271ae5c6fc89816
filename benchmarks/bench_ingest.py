"""Compare reading of raw files and of Parquet with other libraries. Every measurement is a separate process.

    python benchmarks/bench_ingest.py [num_rows [FILE.tsv]]
    python benchmarks/bench_ingest.py [num_rows] --recipes

By default, 5,000,000 synthetic rows are written to TMPDIR (2.4 GB). Rows of a file are repeated. Ingestion of Criteo's
TSV is compared with polars, and reading of Parquet with pyarrow, polars and torch's DataLoader. All readers return
tensors. Peak memory is measured too.

With --recipes, reading raw files by a recipe is compared with the first pass of `prepare` on one core: TSV, CSV, and
Parquet with row groups of 32,768 and 262,144 rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.command import make_parser, parse_arguments
from common.processes import check_tests
from common.timing import alternate
from record import record

NUM_ROUNDS = 3
BATCH_SIZES = (2048, 8192)

# This process stays small: the peak memory of a child begins with that of the process it was forked from.
MEASURE = """
import json, resource, sys, time
{setup}
start = time.perf_counter()
{run}
elapsed = time.perf_counter() - start
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([num_rows / elapsed, peak_mb]))
"""
SYNTH = """
import sys
from pathlib import Path
from meseta.data.synth import SynthOptions, write_click_log
write_click_log(SynthOptions(out=Path(sys.argv[1]), num_rows=int(sys.argv[2])))
"""
REPEAT = """
import itertools, sys
with open(sys.argv[1], "rb") as file, open(sys.argv[2], "wb") as out:
    lines = [line.rstrip(b"\\n") + b"\\n" for line in file]
    out.writelines(itertools.islice(itertools.cycle(lines), int(sys.argv[3])))
"""
# The first pass of `prepare` alone: label, dense and ids of each block.
IN_MEMORY = (
    """
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from meseta.data.prepare.encode import Encoder
from meseta.data.hash_categories import feature_seed
from meseta.data.schema.find_layout import find_layout
from meseta.data.prepare import PrepareOptions
from meseta.data.prepare.sources import find_sources
from meseta.data.formats.format import read_blocks
from meseta.data.prepare.encode import Splitter
from meseta.data.dataset.queues import run_in_order
from meseta.system.processors import num_cores
""",
    """
[source] = find_sources([sys.argv[1]], {}, split_rest=True)
layout = find_layout([source])
hash_rows = dict.fromkeys((column.name for column in layout.sparse), PrepareOptions.hash_rows)
hash_seeds = {name: feature_seed(name, 0) for name in hash_rows}
splitter = Splitter(seed=0)
encoder = Encoder(layout, splitter, hash_seeds=hash_seeds, hash_rows=hash_rows)
with ThreadPoolExecutor(num_cores()) as pool:
    blocks = (partial(encoder.encode, block, block.first_row) for block in read_blocks(source, layout.columns))
    num_rows = sum(encoded.splits["train"].num_rows for encoded in run_in_order(pool, blocks, num_cores() + 1))
""",
)
PREPARE = (
    "from pathlib import Path; from meseta.data.prepare import PrepareOptions, prepare",
    "data = prepare(PrepareOptions(sources=[sys.argv[1]], out=Path(sys.argv[2]), force=True))\n"
    "num_rows = sum(split.num_rows for split in data.splits.values())",
)
VOCABULARY = (PREPARE[0], PREPARE[1].replace("force=True", "force=True, vocabulary=True"))
POLARS = (
    "import polars as pl",
    "types = [pl.Int32] * 14 + [pl.String] * 26\n"
    "num_rows = pl.read_csv(sys.argv[1], separator='\\t', has_header=False, schema_overrides=types).height",
)
READER = (
    "from meseta.data import Reader, ReaderOptions\n"
    "options = ReaderOptions(batch_size=BATCH, shuffle=SHUFFLE)\n"
    "reader = Reader(sys.argv[1], 'train', options)",
    "num_rows = sum(batch.batch_size for batch in reader.epoch())",
)
# What every peer does with a batch of 40 columns: label [B], dense [B, 13] and ids [B, 26] as tensors.
COLUMNS = """
import glob, numpy as np, torch, pyarrow.parquet as pq
paths = sorted(glob.glob(sys.argv[1] + '/train/*.parquet'))
def tensors(columns):
    ids = torch.from_numpy(np.stack(columns[14:], 1))
    return torch.from_numpy(columns[0].copy()), torch.from_numpy(np.stack(columns[1:14], 1)), ids
def record_batches(paths):
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            yield tensors([batch.column(i).to_numpy(zero_copy_only=False) for i in range(40)])
"""
READ = "num_rows = sum(len(label) for label, _, _ in READS)"
PEERS = {
    "pyarrow iter_batches": (COLUMNS, READ.replace("READS", "record_batches(paths)")),
    "pyarrow row groups": (
        COLUMNS
        + """
def row_groups():
    for path in paths:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            whole = tensors([table.column(i).to_numpy() for i in range(40)])
            for start in range(0, table.num_rows, BATCH):
                yield [column[start : start + BATCH] for column in whole]
""",
        READ.replace("READS", "row_groups()"),
    ),
    "polars iter_slices": (
        COLUMNS
        + """
import polars as pl
def slices():
    for path in paths:
        for part in pl.read_parquet(path).iter_slices(BATCH):
            yield tensors([column.to_numpy() for column in part.get_columns()])
""",
        READ.replace("READS", "slices()"),
    ),
    "DataLoader, 2 workers": (
        COLUMNS
        + """
class Files(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return record_batches(paths[worker.id :: worker.num_workers])
loader = torch.utils.data.DataLoader(Files(), batch_size=None, num_workers=2)
""",
        READ.replace("READS", "loader"),
    ),
}
ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
# The same columns in other formats, names in front.
CONVERT = """
import sys
import pyarrow as pa, pyarrow.parquet as pq
from pyarrow import csv
from meseta.data.formats.tsv import CRITEO_LAYOUT
types = {name: pa.string() if name.startswith("cat") else pa.int64() for name in CRITEO_LAYOUT.header}
table = csv.read_csv(sys.argv[1], csv.ReadOptions(column_names=CRITEO_LAYOUT.header), csv.ParseOptions(delimiter="\\t"),
                     csv.ConvertOptions(column_types=types))
csv.write_csv(table, sys.argv[2] + "/log.csv")
pq.write_table(table, sys.argv[2] + "/small.parquet", row_group_size=32_768)
pq.write_table(table, sys.argv[2] + "/large.parquet", row_group_size=262_144)
"""
MAKE_RECIPE = """
import sys
from pathlib import Path
from meseta.data.prepare import PrepareOptions, prepare
prepare(PrepareOptions(sources=[sys.argv[1]], out=Path(sys.argv[2]), recipe_only=True, test_fraction=0.0))
"""
FIRST_PASS = (
    ONE_CORE + "from pathlib import Path; from meseta.data.prepare import PrepareOptions, prepare\n"
    "begun_s = {}\n"
    "def on_progress(stage, rows, share):\n"
    "    begun_s.setdefault(stage, time.perf_counter())",
    "data = prepare(PrepareOptions(sources=[sys.argv[1]], out=Path(sys.argv[2]), force=True, test_fraction=0.0), "
    "on_progress)\n"
    "num_rows = data.splits['train'].num_rows\n"
    "start = time.perf_counter() - (begun_s['write'] - begun_s['read'])",
)
READ_RECIPE = (
    ONE_CORE + "from meseta.data import Reader, ReaderOptions\n"
    "options = ReaderOptions(batch_size=8192, shuffle=SHUFFLE)\n"
    "reader = Reader(sys.argv[1], 'train', options)",
    "num_rows = sum(batch.batch_size for batch in reader.epoch())",
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("num_rows", type=int, nargs="?", default=5_000_000)
    parser.add_argument("file", type=Path, nargs="?", help="TSV file of Criteo's columns")
    parser.add_argument("--recipes", action="store_true", help="measure reading by recipes")
    options = parse_arguments(parser)
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as name:
        folder = Path(name)
        if options.recipes:
            measure_recipes(options.num_rows, folder)
        else:
            measure_ingestion(options.num_rows, options.file, folder)


def run_program(program: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=True)


def measure_ingestion(num_rows: int, real: Path | None, folder: Path) -> None:
    check_tests("tests/data/test_prepare.py", "tests/data/test_reader.py", "tests/data/test_hash_categories.py")
    tsv, data = folder / "raw/day_0.tsv", str(folder / "data")
    if real is None:
        run_program(SYNTH, tsv.parent, num_rows)
    else:
        tsv.parent.mkdir()
        run_program(REPEAT, real.resolve(), tsv, num_rows)
    case = f"{num_rows} rows, {tsv.stat().st_size / 1e6:.0f} MB of text" + (f", {real.name}" if real else "")
    programs = (IN_MEMORY, PREPARE, VOCABULARY, POLARS)
    outputs: tuple[list[str], ...] = ([], [data], [f"{data}-vocabulary"], [])
    *ours, parsed = take_turns([(code, [str(tsv), *out]) for code, out in zip(programs, outputs, strict=True)])
    for metric, (rate, peak_mb) in zip(("TSV to ids in memory", "prepare", "prepare --vocabulary"), ours, strict=True):
        report(case, metric, rate, "rows/s", ("polars read_csv", parsed[0]))
        report(case, f"{metric}, peak memory", peak_mb, "MB", ("polars read_csv", parsed[1]))
    for batch_size in BATCH_SIZES:
        timings = read_parquet(data, batch_size)
        for name in ("reader", "reader, shuffled"):
            metric, (rate, _) = f"{name}, batches of {batch_size}", timings[name]
            for peer in PEERS:
                report(case, metric, rate, "rows/s", (peer, timings[peer][0]))


def read_parquet(data: str, batch_size: int) -> dict[str, tuple[float, float]]:
    readers = {
        name: (READER[0].replace("SHUFFLE", str(shuffle)), READER[1])
        for name, shuffle in (("reader", False), ("reader, shuffled", True))
    }
    cases = {**readers, **PEERS}
    codes = [(setup.replace("BATCH", str(batch_size)), run) for setup, run in cases.values()]
    return dict(zip(cases, take_turns([(code, [data]) for code in codes]), strict=True))


def take_turns(cases: Sequence[tuple[tuple[str, str], list[str]]]) -> list[tuple[float, float]]:
    """Return (median rows/s, maximum peak memory in MB) of each case."""
    results = alternate({place: partial(measure, *case) for place, case in enumerate(cases)}, NUM_ROUNDS)
    return [(statistics.median(r for r, _ in timings), max(m for _, m in timings)) for timings in results.values()]


def measure(code: tuple[str, str], arguments: Sequence[str]) -> tuple[float, float]:
    """Return (rows/s, peak memory in MB) of a process."""
    program = MEASURE.format(setup=code[0], run=code[1])
    child = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if child.returncode:
        sys.exit(f"bench_ingest: a measurement failed, nothing is reported\n{child.stderr}")
    rate, peak_mb = json.loads(child.stdout)
    return rate, peak_mb


def report(case: str, metric: str, value: float, unit: str, peer: tuple[str, float]) -> None:
    packages = ("pyarrow", "polars", "numpy", "torch")
    record("ingest", case, metric, value, unit, peer=peer[0], peer_value=peer[1], packages=packages)


def measure_recipes(num_rows: int, folder: Path) -> None:
    check_tests("tests/data/test_recipe.py", "tests/data/test_recipe_faults.py")
    run_program(SYNTH, folder, num_rows)
    run_program(CONVERT, folder / "day_0.tsv", folder)
    sources = {
        "TSV": "day_0.tsv",
        "CSV": "log.csv",
        "Parquet, row groups of 32,768": "small.parquet",
        "Parquet, row groups of 262,144": "large.parquet",
    }
    for kind, name in sources.items():
        measure_recipe(f"{num_rows} rows, {kind}", str(folder / name), folder)


def measure_recipe(case: str, source: str, folder: Path) -> None:
    recipe = str(folder / f"recipe-{Path(source).name}")
    run_program(MAKE_RECIPE, source, recipe)
    codes = {
        how: (READ_RECIPE[0].replace("SHUFFLE", str(how == "shuffled")), READ_RECIPE[1])
        for how in ("in order", "shuffled")
    }
    cases = [(FIRST_PASS, [source, str(folder / "prepared")]), *((code, [recipe]) for code in codes.values())]
    (first_pass, _), *rates = take_turns(cases)
    for how, (rate, _) in zip(codes, rates, strict=True):
        record("recipes", case, f"through a recipe, {how}", rate, "rows/s", peer="prepare's first pass",
               peer_value=first_pass, packages=("pyarrow", "numpy", "torch"))  # fmt: skip


if __name__ == "__main__":
    main()
