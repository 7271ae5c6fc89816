"""Compare the adaptive range of quantized rows with torch's search and k-means: rows per second and squared error.

    python benchmarks/bench_quantize.py [--checkpoint RUN/checkpoints/step-000000782] [--rows 8192] [--threads 1]

Rows are those of a checkpoint that training has changed, and random ones of 16 and 64 columns, with and without
outliers. torch searches with `optimized_qparams=True`. K-means of each row is the bound of any codebook.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from common.command import make_parser, parse_arguments
from common.timing import alternate_seconds
from record import record
from sklearn.cluster import KMeans
from torch import Tensor

from meseta.ops.core import instruction_set
from meseta.ops.quantize import RowFormat, dequantize_rows, quantize_rows
from meseta.system.processors import read_processor

NUM_TURNS, NUM_CLUSTERED = 7, 60
BITS: dict[RowFormat, int] = {"int4": 4, "int2": 2}


def trained_rows(checkpoint: Path, num_rows: int) -> Tensor:
    """Return a sample of rows that training has changed."""
    parts, random = [], np.random.default_rng(1)
    tables = list(json.loads((checkpoint / "manifest.json").read_text())["tables"].values())
    for entry in tables:
        for block in entry["blocks"]:
            batch = pa.ipc.open_file(pa.memory_map(str(checkpoint / block["path"]))).get_batch(0)
            rows, *states = (
                np.asarray(batch.column(column["name"]).flatten()).reshape(len(batch), -1)
                if column["kind"] == "element"
                else np.asarray(batch.column(column["name"])).reshape(len(batch), -1)
                for column in entry["columns"]
            )
            if rows.dtype == np.float32 and entry["embedding_dim"] == tables[0]["embedding_dim"] and states:
                parts.append(rows[(states[0] != 0).any(1)])
    stepped = np.concatenate(parts)
    return torch.from_numpy(stepped[np.sort(random.permutation(len(stepped))[:num_rows])])


def drawn_rows(num_rows: int) -> dict[str, Tensor]:
    random, rows = np.random.default_rng(2), {}
    for dim in (16, 64):
        values = random.normal(size=(num_rows, dim)) * 0.05
        rows[f"normal rows, {dim} columns"] = torch.from_numpy(values).float()
        values[np.arange(num_rows), random.integers(0, dim, num_rows)] *= 10
        rows[f"rows with outliers, {dim} columns"] = torch.from_numpy(values).float()
    return rows


def squared_error(rows: Tensor, restored: Tensor) -> float:
    return float((restored.double() - rows.double()).square().mean())


def clustered_error(rows: Tensor, num_codes: int) -> float:
    """Return the error of k-means with `num_codes` clusters for each row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows with fewer different values than clusters
        fits = [KMeans(num_codes, n_init=4, random_state=0).fit(row.double().numpy()[:, None]) for row in rows]
    return sum(fit.inertia_ for fit in fits) / rows.numel()


def compare(name: str, rows: Tensor, row_format: RowFormat) -> None:
    bits, dim = BITS[row_format], rows.shape[1]
    restored = {
        way: dequantize_rows(quantize_rows(rows, row_format, adaptive=way == "adaptive"), row_format, dim)
        for way in ("adaptive", "whole range")
    }
    error = squared_error(rows, restored["adaptive"])
    few = slice(0, NUM_CLUSTERED)
    bound = clustered_error(rows[few], 2**bits)
    few_error = squared_error(rows[few], restored["adaptive"][few])
    print(f"{name}, {row_format}: squared error {error:.3g}; the whole range's is "
          f"{squared_error(rows, restored['whole range']) / error:.2f} of it, k-means' "
          f"{bound / few_error:.2f} (of {NUM_CLUSTERED} rows)")  # fmt: skip
    packed = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_prepack")
    unpack = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_unpack")
    calls = {"adaptive": lambda: quantize_rows(rows, row_format, adaptive=True),
             "whole range": lambda: quantize_rows(rows, row_format),
             "torch": lambda: packed(rows, optimized_qparams=True)}  # fmt: skip
    seconds = {call: min(times) for call, times in alternate_seconds(calls, NUM_TURNS).items()}
    peer_error = squared_error(rows, unpack(packed(rows, optimized_qparams=True)))
    case, peer = f"{name}, {row_format}", f"torch {bits}bit_prepack, optimized_qparams"
    record("quantize", case, "squared error", error / peer_error, "of theirs", peer=peer, peer_value=1.0)
    record("quantize", case, "adaptive range", len(rows) / seconds["adaptive"], "rows/s", peer=peer,
           peer_value=len(rows) / seconds["torch"])  # fmt: skip
    print("  " + ", ".join(f"{call} {taken / len(rows) * 1e9:.0f} ns a row" for call, taken in seconds.items()))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="a folder of a run's checkpoints; without it, drawn rows alone")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    options = parse_arguments(parser)
    torch.set_num_threads(options.threads)
    print(f"{read_processor().name}, core {instruction_set()}, torch {torch.__version__}, {options.threads} threads")
    drawn = drawn_rows(options.rows)
    trained = trained_rows(options.checkpoint, options.rows) if options.checkpoint else None
    sets = ({} if trained is None else {f"trained rows, {trained.shape[1]} columns": trained}) | drawn
    for name, rows in sets.items():
        for row_format in BITS:
            compare(name, rows, row_format)


if __name__ == "__main__":
    main()
