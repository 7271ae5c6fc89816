"""Compare loading the tables of a parent by value with resuming a checkpoint, and with torch and pandas.

    python benchmarks/bench_start.py [--rows 1000000] [--rounds 5]

A checkpoint has eight tables of 60 columns with row-wise Adagrad, 2 GB in all. Each round loads, in turn and with cold
files,
- the same tables, as a resumed run does;
- tables with 10 % more rows, whose vocabulary has grown, from both vocabulary files;
- tables of another vocabulary: 90 % of the values in another order, and 10 % new ones;
- the latter with `torch.load`, `pandas.Index.get_indexer` and `torch.index_select`, from a file of the same rows.

Loaded rows are first compared with those of torch and pandas. Ratios are medians over rounds. It needs 12 GB.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common.command import make_parser
from common.tables import format_table

from meseta import checkpoint
from meseta.checkpoint.loading import TableSource
from meseta.comm import World
from meseta.optim import make_row_optimizer
from meseta.spec import OptimizerSpec, Plan, Shard, TableSpec
from meseta.storage import TableShard
from meseta.train.start.row_sources import map_vocabularies

NUM_TABLES, NUM_COLUMNS, NEW_SHARE = 8, 60, 0.1
OPTIMIZER = OptimizerSpec(name="rowwise_adagrad")
MAX_GROWN_RATIO, MIN_PEER_RATIO = 1.25, 2.5
"""Maximum time relative to resuming, and minimum speed relative to torch and pandas."""
Names = list[str]


def specs(num_rows: int) -> list[TableSpec]:
    return [
        TableSpec(name=f"table_{number}", num_embeddings=num_rows, embedding_dim=NUM_COLUMNS, optimizer=OPTIMIZER)
        for number in range(NUM_TABLES)
    ]


def make_shards(num_rows: int) -> list[TableShard]:
    whole = {"rows": (0, num_rows), "columns": (0, NUM_COLUMNS), "ranks": (0,)}
    return [
        TableShard.create(spec, Shard(table=spec.name, **whole), make_row_optimizer(OPTIMIZER), seed=0, device="cpu")
        for spec in specs(num_rows)
    ]


class Files:
    """Checkpoint, vocabularies and a file for torch, of the same rows."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        draw = np.random.default_rng(0)
        values = np.array([f"user-{number:010d}" for number in draw.permutation(10 * num_rows)[: int(1.2 * num_rows)]])
        old, new = values[: num_rows - 1], values[num_rows:][: int(NEW_SHARE * num_rows)]
        moved = draw.permutation(np.concatenate([old[: len(old) - len(new)], new]))
        self.orders = {"before": old, "grown": np.concatenate([old, new]), "moved": moved}
        for name, order in self.orders.items():
            column = pa.array([None, *order.tolist()], pa.large_string())
            pq.write_table(pa.table({"value": column}), folder / f"{name}.parquet")
        self.folder, self.num_rows, shards = folder, num_rows, make_shards(num_rows)
        for shard in shards:
            shard.state["sum"].uniform_()
        plan = Plan.from_dict({"tables": {"*": "table_wise"}}, specs(num_rows), 1)
        self.saved = checkpoint.save(
            folder / "saved", world=World.single(), step=1, plan=plan, shards=shards, dense={}, state={}
        )
        rows = {shard.spec.name: (shard.weight, shard.state["sum"]) for shard in shards}
        torch.save({"values": old.tolist(), "rows": rows}, folder / "rows.pt")

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.saved.rglob("*") if path.is_file())

    def evict(self) -> None:
        """Remove the files from the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def values(self, name: str) -> pa.Array:
        return pq.read_table(self.folder / f"{name}.parquet")["value"].combine_chunks().cast(pa.large_binary())

    def load(self, name: str, shards: list[TableShard]) -> None:
        sources = None
        if name != "before":
            # Each feature has its own vocabulary.
            maps = map_vocabularies([lambda: (self.values("before"), self.values(name)) for _ in shards])
            sources = {shard.spec.name: TableSource(rows=rows) for shard, rows in zip(shards, maps, strict=True)}
        checkpoint.load(self.saved, world=World.single(), shards=shards, sources=sources)

    def load_with_torch(self, name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return (rows, states) of the new values of each table. Rows of new values are those of row 0."""
        saved, tables = torch.load(self.folder / "rows.pt", weights_only=True), {}
        for table, (rows, state) in saved["rows"].items():
            now = pq.read_table(self.folder / f"{name}.parquet")["value"].to_pandas()[1:]
            at = pd.Index(saved["values"]).get_indexer(now)
            places = torch.from_numpy(np.concatenate([[0], at + 1]))
            tables[table] = rows.index_select(0, places), state.index_select(0, places)
        return tables

    def check(self, name: str) -> None:
        """Raise AssertionError unless rows of known values equal those of torch."""
        shards = make_shards(len(self.orders[name]) + 1)
        initial = {shard.spec.name: shard.weight.clone() for shard in shards}
        self.load(name, shards)
        is_known = np.concatenate([[True], np.isin(self.orders[name], self.orders["before"])])
        for shard in shards:
            rows, state = self.load_with_torch(name)[shard.spec.name]
            expected = torch.where(torch.from_numpy(is_known)[:, None], rows, initial[shard.spec.name])
            assert torch.equal(shard.weight, expected)
            assert torch.equal(shard.state["sum"], torch.where(torch.from_numpy(is_known), state, 0))


def time_s(files: Files, action: Callable[[], object]) -> float:
    files.evict()
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        places = [Path(folder) / name for name in ("small", "large")]
        for place in places:
            place.mkdir()
        small = Files(places[0], 5000)
        for name in ("grown", "moved"):
            small.check(name)
        files = Files(places[1], options.rows)
        shards = {name: make_shards(len(order) + 1) for name, order in files.orders.items()}
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name in files.orders:
                times.setdefault(name, []).append(time_s(files, lambda n=name: files.load(n, shards[n])))  # type: ignore[misc]
            times.setdefault("torch and pandas", []).append(time_s(files, lambda: files.load_with_torch("moved")))
        medians = {name: statistics.median(of_name) for name, of_name in times.items()}
        rows = [[name, f"{median:.2f}", f"{median / medians['before']:.2f}"] for name, median in medians.items()]
        print(f"{files.num_bytes() / 1e9:.2f} GB\n{format_table(['load', 's', 'of resuming'], rows)}")
        grown = statistics.median(g / b for g, b in zip(times["grown"], times["before"], strict=True))
        peer = statistics.median(p / m for p, m in zip(times["torch and pandas"], times["moved"], strict=True))
        print(f"grown, of resuming: {grown:.2f}, asked: at most {MAX_GROWN_RATIO}")
        print(f"torch and pandas, of another vocabulary: {peer:.2f}, asked: at least {MIN_PEER_RATIO}")


if __name__ == "__main__":
    main()
