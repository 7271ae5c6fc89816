"""The adaptive range of quantised rows on a CPU: rows a second and squared error, beside torch's search and k-means.

    python benchmarks/bench_quantize.py [--checkpoint RUN/checkpoints/step-000000782] [--rows 8192] [--threads 1]

Rows are trained ones, of the tables of a checkpoint, of which those with a state that is not zero were stepped; and
drawn ones of 16 and 64 columns: normal, and with one value of each row ten times as large. torch searches with
`quantized::embedding_bag_4bit_prepack` and `_2bit_prepack`, `optimized_qparams=True`. scikit-learn's k-means of each
row's own values shows what any codebook of as many codes could reach. Calls are timed in turns; figures go to
benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from record import record
from sklearn.cluster import KMeans
from torch import Tensor
from turns import best_s

from meseta.ops.core import instruction_set
from meseta.ops.quantize import RowFormat, dequantize_rows, quantize_rows
from meseta.system.processors import read_processor

NUM_TURNS, NUM_CLUSTERED = 7, 60
BITS: dict[RowFormat, int] = {"int4": 4, "int3": 3, "int2": 2}


def trained_rows(checkpoint: Path, num_rows: int) -> Tensor:
    """A sample of the rows that steps have changed, over all tables of the first one's width."""
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
    """What is left when each row's values are replaced by the nearest of their own `num_codes` means."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows with fewer different values than clusters
        fits = [KMeans(num_codes, n_init=4, random_state=0).fit(row.double().numpy()[:, None]) for row in rows]
    return sum(fit.inertia_ for fit in fits) / rows.numel()


def compare(name: str, rows: Tensor, row_format: RowFormat, recording: Callable[..., None]) -> None:
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
    calls = {"adaptive": lambda: quantize_rows(rows, row_format, adaptive=True),
             "whole range": lambda: quantize_rows(rows, row_format)}  # fmt: skip
    if bits == 3:  # torch has none
        seconds = best_s(calls, NUM_TURNS)
    else:
        packed = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_prepack")
        unpack = getattr(torch.ops.quantized, f"embedding_bag_{bits}bit_unpack")
        seconds = best_s(calls | {"torch": lambda: packed(rows, optimized_qparams=True)}, NUM_TURNS)
        theirs = squared_error(rows, unpack(packed(rows, optimized_qparams=True)))
        case, peer = f"{name}, {row_format}", f"torch {bits}bit_prepack, optimized_qparams"
        recording("quantize", case, "squared error", error / theirs, "of theirs", peer=peer, peer_value=1.0)
        recording("quantize", case, "adaptive range", len(rows) / seconds["adaptive"], "rows/s",
                  peer=peer, peer_value=len(rows) / seconds["torch"])  # fmt: skip
    print("  " + ", ".join(f"{call} {taken / len(rows) * 1e9:.0f} ns a row" for call, taken in seconds.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a folder of a run's checkpoints; without it, drawn rows alone")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.csv as it is")
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    print(f"{read_processor().name}, core {instruction_set()}, torch {torch.__version__}, {told.threads} threads")
    drawn = drawn_rows(told.rows)
    trained = trained_rows(told.checkpoint, told.rows) if told.checkpoint else None
    sets = ({} if trained is None else {f"trained rows, {trained.shape[1]} columns": trained}) | drawn
    for name, rows in sets.items():
        for row_format in BITS:
            compare(name, rows, row_format, print_only if told.no_record else record)


def print_only(
    benchmark: str, case: str, metric: str, value: float, unit: str, *, peer: str, peer_value: float
) -> None:
    ratio = value / peer_value if unit == "rows/s" else peer_value / value
    print(f"{benchmark} {case} {metric} {value:,.4g} {unit} {peer} {peer_value:,.4g} x {ratio:.2f}")


if __name__ == "__main__":
    main()
