"""Criteo's TSV to hashed ids in memory and to Parquet (`meseta prepare`), beside polars' parse of the same file;
Parquet to batches beside pyarrow, polars and torch's DataLoader, all of which end in tensors, and beside decoding
alone, which is the limit.

    python benchmarks/bench_ingest.py [num_rows [FILE.tsv]]

Default 5,000,000 rows, synthetic, or those of a file again and again, in the directory for temporary files (TMPDIR;
1.2 GB of text and as much while preparing).
Every measurement runs in a process of its own, which also tells its peak memory; peers and ours take turns. Runs the
correctness tests first and reports nothing when they fail. Appends to benchmarks/results.csv.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from record import ROOT, record

TESTS = ["tests/data/test_prepare.py", "tests/data/test_reader.py", "tests/data/test_hash_categories.py"]
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
# What `prepare` does in its first pass, without keeping anything: label, dense and ids of each block.
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
LIMIT = (
    COLUMNS,
    "files = [pq.ParquetFile(path) for path in paths]\n"
    "num_rows = sum(file.read_row_group(g).num_rows for file in files for g in range(file.num_row_groups))",
)


def main() -> None:
    num_rows = int(sys.argv[1].replace("_", "")) if len(sys.argv) > 1 else 5_000_000
    real = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
    subprocess.run([sys.executable, "-m", "pytest", *TESTS], check=True, cwd=ROOT)
    with tempfile.TemporaryDirectory(prefix="meseta-bench-") as folder:
        tsv, data = f"{folder}/raw/day_0.tsv", f"{folder}/data"
        if real is None:
            subprocess.run([sys.executable, "-c", SYNTH, f"{folder}/raw", str(num_rows)], check=True)
        else:
            Path(tsv).parent.mkdir()
            subprocess.run([sys.executable, "-c", REPEAT, str(real), tsv, str(num_rows)], check=True)
        case = f"{num_rows} rows, {Path(tsv).stat().st_size / 1e6:.0f} MB of text" + (f", {real.name}" if real else "")
        in_memory, prepared, with_vocabulary, parsed = take_turns(
            [
                (IN_MEMORY, [tsv]),
                (PREPARE, [tsv, data]),
                (VOCABULARY, [tsv, f"{folder}/vocabulary"]),
                (POLARS, [tsv]),
            ]
        )
        read = {batch_size: read_parquet(data, batch_size) for batch_size in BATCH_SIZES}
    for name, ours in (
        ("TSV to ids in memory", in_memory),
        ("prepare", prepared),
        ("prepare --vocabulary", with_vocabulary),
    ):
        report(case, name, ours[0], "rows/s", ("polars read_csv", parsed[0]))
        report(case, f"{name}, peak memory", ours[1], "MB", ("polars read_csv", parsed[1]))
    for batch_size, found in read.items():
        for name in ("reader", "reader, shuffled"):
            for peer in (*PEERS, "decoding alone"):
                report(case, f"{name}, batches of {batch_size}", found[name][0], "rows/s", (peer, found[peer][0]))
            peer = "pyarrow iter_batches"
            report(case, f"{name}, batches of {batch_size}, peak memory", found[name][1], "MB", (peer, found[peer][1]))


def read_parquet(data: str, batch_size: int) -> dict[str, tuple[float, float]]:
    """Rows per second and peak memory of our reader, of its peers, and of decoding alone."""
    readers = {
        name: (READER[0].replace("SHUFFLE", str(shuffle)), READER[1])
        for name, shuffle in (("reader", False), ("reader, shuffled", True))
    }
    cases = {**readers, **PEERS, "decoding alone": LIMIT}
    codes = [(setup.replace("BATCH", str(batch_size)), run) for setup, run in cases.values()]
    return dict(zip(cases, take_turns([(code, [data]) for code in codes]), strict=True))


def take_turns(cases: Sequence[tuple[tuple[str, str], list[str]]]) -> list[tuple[float, float]]:
    """(median rows per second, highest peak in MB) of each case, over rounds in which all cases take turns."""
    results: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(NUM_ROUNDS):
        for ((setup, run), arguments), found in zip(cases, results, strict=True):
            code = MEASURE.format(setup=setup, run=run)
            child = subprocess.run(
                [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
            )
            if child.returncode:
                sys.exit(f"bench_ingest: a measurement failed, nothing is reported\n{child.stderr}")
            found.append(tuple(json.loads(child.stdout)))
    return [(statistics.median(r for r, _ in found), max(m for _, m in found)) for found in results]


def report(case: str, metric: str, value: float, unit: str, peer: tuple[str, float]) -> None:
    """One line of the results."""
    packages = ("pyarrow", "polars", "numpy", "torch")
    record("ingest", case, metric, value, unit, peer=peer[0], peer_value=peer[1], packages=packages)


if __name__ == "__main__":
    main()
