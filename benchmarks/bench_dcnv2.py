"""Train DLRM-DCNv2 at the shapes of MLPerf Training on one GPU, and compare a step with the limits of the card.

    python benchmarks/bench_dcnv2.py [--optimizer adagrad] [--max-rows N] [--rows-dtype bfloat16] [--no-record]
    python benchmarks/bench_dcnv2.py --tiny    a small model, on any machine

26 tables have 204M rows of 128 columns, and a sample has 214 ids. The dense part computes in bfloat16. Rows are float32
if they fit the memory of the card, else bfloat16. If these do not fit either, tables have fewer rows. With element-wise
Adagrad, tables have at most 20M rows, because its state is as large as float32 rows.

The work differs from MLPerf's benchmark:
- One card has all tables, so that no all-to-all moves ids, rows or gradients, and no all-reduce sums dense gradients.
- Rows are updated with row-wise instead of element-wise Adagrad by default, and the dense part with Adam instead of
  Adagrad.
- Ids are synthetic and uniform. MLPerf's ids come from Criteo's log, and repeat more often.
- Batches are created and packed into pinned memory before the timed steps. Each has new ids and is copied in its step.
- No quality is evaluated.

The limit of a step is the time of its bytes at the rate of a large copy, plus that of its matrix products at the rate
of a large product in the same run. benchmarks/dcnv2/shape.py counts both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

import torch
from common.command import make_parser, parse_arguments
from common.device_rates import COPY_BYTES, PRODUCT_SIZE, copy_rate, product_rate
from common.tables import table
from dcnv2.shape import MLPERF, TINY, Dcnv2Shape, RowDtype, RowOptimizerName
from dcnv2.training import Dcnv2Training
from record import record

NUM_STEPS, NUM_ROUNDS = 20, 5
NUM_WARM_UP_STEPS = 25
"""Number of steps that compile kernels and capture the graphs of a step, without and with times of its stages."""
MAX_ROWS = {"sgd": 40_000_000, "rowwise_adagrad": 40_000_000, "adagrad": 20_000_000}
"""Largest number of rows per table by optimizer."""
SAMPLE_BYTES, RESERVED_BYTES = 300_000, 2_000_000_000
"""Device memory per sample, for eager and captured steps, and for CUDA and compiled kernels. Both are estimates."""
MLPERF_H200_RATE = 1.81e6
"""Samples per second of one of the eight H200 in the fastest result of MLPerf Training v5.1."""


@dataclass(frozen=True)
class CardRates:
    """Measured rates of a device."""

    copy: float
    """Bytes per second that a copy reads and writes."""
    matrix: float
    """Operations per second of a matrix product in the data type of the dense part."""

    def limit_s(self, shape: Dcnv2Shape) -> float:
        """Return the seconds of a step's bytes and matrix products at these rates."""
        return shape.total_work.num_bytes / self.copy + shape.product_flops / self.matrix


@dataclass(frozen=True)
class Result:
    """Measured training."""

    shape: Dcnv2Shape
    step_s: float
    """Median seconds of a step."""
    stages_ms: dict[str, float]
    """Mean milliseconds of each stage."""
    num_replayed: int
    """Number of steps that CUDA graphs replayed."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.shape.batch_size / self.step_s


def fit(shape: Dcnv2Shape, num_bytes: int, rows_dtype: RowDtype | None = None) -> Dcnv2Shape:
    """Return a shape whose training fits `num_bytes` of device memory.

    Rows are float32, or bfloat16 if float32 rows do not fit, unless `rows_dtype` is given. If neither fits, the
    largest tables have half as many rows, and so on.
    """
    left = num_bytes - RESERVED_BYTES - SAMPLE_BYTES * shape.batch_size
    dtypes: Sequence[RowDtype] = ("float32", "bfloat16") if rows_dtype is None else (rows_dtype,)
    max_rows = max(shape.rows)
    while max_rows:
        for dtype in dtypes:
            fitted = replace(shape.with_max_rows(max_rows), rows_dtype=dtype)
            if fitted.table_bytes <= left:
                return fitted
        max_rows //= 2
    raise SystemExit(
        f"bench_dcnv2: batches of {shape.batch_size:,} samples do not fit {num_bytes / 1e9:.0f} GB of device memory; "
        "choose a smaller --batch-size"
    )


def measure_rates(shape: Dcnv2Shape, device: str, *, is_tiny: bool = False) -> CardRates:
    """Measure the rates of a large copy and of a large matrix product, or of small ones."""
    num_bytes, size = (1 << 20, 64) if is_tiny else (COPY_BYTES, PRODUCT_SIZE)
    dtype = getattr(torch, shape.dense_dtype)
    return CardRates(copy_rate(device, num_bytes), product_rate(dtype, device, size))


def measure(shape: Dcnv2Shape, device: str, num_steps: int = NUM_STEPS, num_rounds: int = NUM_ROUNDS) -> Result:
    """Train, and return the median time of a step over rounds of `num_steps` steps."""
    training = Dcnv2Training(shape, device)
    training.time_steps(NUM_WARM_UP_STEPS)
    training.pop_stages_ms()
    rounds = [training.time_steps(num_steps) for _ in range(num_rounds)]
    return Result(shape, statistics.median(rounds), training.pop_stages_ms(), training.num_replayed)


def describe(shape: Dcnv2Shape) -> str:
    """Return the case of a result."""
    num_rows = sum(shape.rows)
    rows = f"{num_rows / 1e6:.0f}M rows" if num_rows >= 1e6 else f"{num_rows} rows"
    return f"B {shape.batch_size} {shape.rows_dtype} rows of {shape.dim}, {rows}, {shape.optimizer}"


def print_result(result: Result, rates: CardRates) -> None:
    """Print the work of a step next to the rates of the card, and the stages of the step."""
    shape, works = result.shape, result.shape.work()
    rows = [
        (name, f"{work.num_bytes / 1e6:,.1f}", f"{work.num_bytes / shape.batch_size / 1e3:,.2f}",
         f"{work.num_flops / shape.batch_size / 1e6:,.2f}", f"{1e3 * work.num_bytes / rates.copy:,.3f}")
        for name, work in {**works, "total": shape.total_work}.items()
    ]  # fmt: skip
    head = ("operator", "MB per step", "KB per sample", "MFLOP per sample", "ms at the rate of a copy")
    table("Computed work of a step", head, rows)
    limit_s, product_s = rates.limit_s(shape), shape.product_flops / rates.matrix
    table(
        describe(shape),
        ("quantity", "value"),
        [
            ("samples/s", f"{result.rate:,.0f}"),
            ("step", f"{1e3 * result.step_s:,.3f} ms"),
            ("copy, read and written", f"{rates.copy / 1e9:,.0f} GB/s"),
            (f"matrix product in {shape.dense_dtype}", f"{rates.matrix / 1e12:,.3g} TFLOP/s"),
            ("limit: bytes, then products", f"{1e3 * (limit_s - product_s):,.3f} + {1e3 * product_s:,.3f} ms"),
            ("share of the limit", f"{100 * limit_s / result.step_s:.0f} %"),
            ("replayed steps", str(result.num_replayed)),
        ],
    )
    table("Stages", ("stage", "ms"), [(name, f"{value:.3f}") for name, value in result.stages_ms.items()])


def make_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=get_args(RowOptimizerName))
    parser.add_argument("--max-rows", type=int, metavar="N", help="largest number of rows of a table")
    parser.add_argument("--rows-dtype", choices=get_args(RowDtype), help="(default: float32 if it fits, else bfloat16)")
    parser.add_argument("--batch-size", type=int, help=f"(default: {MLPERF.batch_size:,})")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"of each of {NUM_ROUNDS} rounds")
    parser.add_argument("--tiny", action="store_true", help="a small model, also without a GPU")
    return parse_arguments(parser)


def main() -> None:
    chosen = make_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not chosen.tiny:
        print("bench_dcnv2: torch sees no GPU here, so nothing was measured; --tiny trains a small model")
        return
    base = TINY if chosen.tiny else MLPERF
    max_rows = chosen.max_rows or MAX_ROWS[chosen.optimizer]
    shape = replace(base.with_max_rows(max_rows), optimizer=cast(RowOptimizerName, chosen.optimizer))
    shape = replace(shape, batch_size=chosen.batch_size or shape.batch_size)
    if device == "cuda":
        shape = fit(shape, torch.cuda.get_device_properties(0).total_memory, chosen.rows_dtype)
    else:
        shape = replace(shape, rows_dtype=chosen.rows_dtype or "float32")
    rates = measure_rates(shape, device, is_tiny=chosen.tiny)
    result = measure(shape, device, chosen.steps)
    print_result(result, rates)
    if chosen.tiny:
        return
    case = f"{describe(shape)}, {torch.cuda.get_device_name()}"
    record("dcnv2", case, "training", result.rate, "samples/s", peer="limit of copy and products",
           peer_value=shape.batch_size / rates.limit_s(shape))  # fmt: skip
    print(f"MLPerf Training v5.1 has {MLPERF_H200_RATE:,.0f} samples/s per H200, with other work, see --help.")


if __name__ == "__main__":
    main()
