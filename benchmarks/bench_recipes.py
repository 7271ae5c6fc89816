"""Compare reading raw files by a recipe with the first pass of `prepare`, in rows per second on one core.

    python benchmarks/bench_recipes.py [num_rows]

By default, 1,000,000 synthetic rows of Criteo's columns: as TSV, as CSV, and as Parquet with row groups of 32,768 and
262,144 rows. Every measurement is a separate process.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from bench_ingest import SYNTH, take_turns
from record import ROOT, record

TESTS = ["tests/data/test_recipe.py", "tests/data/test_recipe_faults.py"]
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
MAKE = """
import sys
from pathlib import Path
from meseta.data.prepare import PrepareOptions, prepare
prepare(PrepareOptions(sources=[sys.argv[1]], out=Path(sys.argv[2]), recipe_only=True, test_fraction=0.0,
                       valid_fraction=float(sys.argv[3])))
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
READ = (
    ONE_CORE + "from meseta.data import Reader, ReaderOptions\n"
    "options = ReaderOptions(batch_size=8192, shuffle=SHUFFLE)\n"
    "reader = Reader(sys.argv[1], 'SPLIT', options)",
    "num_rows = sum(batch.batch_size for batch in reader.epoch())",
)


def main() -> None:
    num_rows = int(sys.argv[1].replace("_", "")) if len(sys.argv) > 1 else 1_000_000
    subprocess.run([sys.executable, "-m", "pytest", *TESTS], check=True, cwd=ROOT)
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as folder:
        subprocess.run([sys.executable, "-c", SYNTH, folder, str(num_rows)], check=True)
        subprocess.run([sys.executable, "-c", CONVERT, f"{folder}/day_0.tsv", folder], check=True)
        sources = {
            "TSV": "day_0.tsv",
            "CSV": "log.csv",
            "Parquet, row groups of 32,768": "small.parquet",
            "Parquet, row groups of 262,144": "large.parquet",
        }
        for kind, name in sources.items():
            measure(f"{num_rows} rows, {kind}", f"{folder}/{name}", Path(folder))


def measure(case: str, source: str, folder: Path) -> None:
    recipe, parted = f"{folder}/recipe-{Path(source).name}", f"{folder}/parted-{Path(source).name}"
    for out, share in ((recipe, 0.0), (parted, 0.1)):
        subprocess.run([sys.executable, "-c", MAKE, source, out, str(share)], check=True)
    ways = {
        "in order": (recipe, "False", "train"),
        "shuffled": (recipe, "True", "train"),
        "a split of 90 %, drawn by seed, shuffled": (parted, "True", "train"),
        "a split of 10 %, drawn by seed, in order": (parted, "False", "valid"),
    }
    reads = [
        ((READ[0].replace("SHUFFLE", shuffle).replace("SPLIT", split), READ[1]), [out])
        for out, shuffle, split in ways.values()
    ]
    (first_pass, _), *rates = take_turns([(FIRST_PASS, [source, f"{folder}/prepared"]), *reads])
    for way, (rate, _) in zip(ways, rates, strict=True):
        record("recipes", case, f"through a recipe, {way}", rate, "rows/s", peer="prepare's first pass",
               peer_value=first_pass, packages=("pyarrow", "numpy", "torch"))  # fmt: skip


if __name__ == "__main__":
    main()
