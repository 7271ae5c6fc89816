"""Speed of DLRM-DCNv2 at MLPerf's shapes."""

from __future__ import annotations

from dataclasses import replace

import torch
from bench_dcnv2 import MAX_ROWS, CardRates, Result, fit, measure, measure_rates, print_result
from dcnv2.shape import MLPERF, RowOptimizerName

from gpu_parts.rows import RowWriter

MIN_RATES = {("H200", "float32"): 1.81e6, ("H100", "bfloat16"): 1.6e6}
"""Smallest samples per second by card and data type of the rows, for row-wise Adagrad."""


def check(rows: RowWriter) -> None:
    measure_optimizer(rows, "rowwise_adagrad")


def check_adagrad(rows: RowWriter) -> None:
    measure_optimizer(rows, "adagrad")


def measure_optimizer(rows: RowWriter, optimizer: RowOptimizerName) -> None:
    shape = replace(MLPERF.with_max_rows(MAX_ROWS[optimizer]), optimizer=optimizer)
    shape = fit(shape, torch.cuda.get_device_properties(0).total_memory)
    rates = measure_rates(shape, "cuda")
    result = measure(shape, "cuda")
    print_result(result, rates)
    add_outcome(rows, torch.cuda.get_device_name(), result, rates)


def add_outcome(rows: RowWriter, card: str, result: Result, rates: CardRates) -> None:
    """Add the rate of a training on a card, and its share of the limit."""
    shape = result.shape
    quantity = f"DCNv2, {shape.batch_size:,}, {sum(shape.rows) / 1e6:.0f}M {shape.rows_dtype} rows, {shape.optimizer}"
    limits = [
        limit for (name, dtype), limit in MIN_RATES.items() if name in card and dtype == shape.rows_dtype
    ] if shape.optimizer == "rowwise_adagrad" else []  # fmt: skip
    if limits:
        rows.at_least(quantity, result.rate, limits[0], "samples/s")
    else:
        rows.measured(quantity, result.rate, "samples/s")
    limit = f"% of {rates.copy / 1e9:,.0f} GB/s and {rates.matrix / 1e12:,.0f} TFLOP/s"
    rows.measured(f"{quantity}: share of the limit", 100 * rates.limit_s(shape) / result.step_s, limit)
    stages = ", ".join(f"{name} {value:.2f}" for name, value in result.stages_ms.items())
    rows.measured(f"{quantity}: stages", f"{stages} ms; {result.num_replayed} replayed steps")
