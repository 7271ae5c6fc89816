"""Speed of the models relative to the same models in torch modules, and to stored results of the same card."""

from __future__ import annotations

import csv
import gc
import traceback
from collections.abc import Mapping, Sequence

import torch
from bench_models import make_workload, measure, result_case
from peers.plain_models import PLAIN
from record import RESULTS

from gpu_parts.rows import RowWriter
from meseta.measure.synthetic_batches import make_training_batches

PEERS = {"float32": "torch", "bfloat16": "torch autocast"}
COMPILED = ("dlrm", "dcnv2")
MIN_RATIOS_2048 = {"float32": dict.fromkeys(PLAIN, 3.0) | {"dlrm": 5.0, "dcnv2": 5.0}}
MIN_RATIOS_65536 = {"float32": dict.fromkeys(PLAIN, 1.3), "bfloat16": dict.fromkeys(PLAIN, 1.1)}
MIN_FORMER_RATIO = 0.97
"""Smallest speed relative to the last stored result. The difference to 1 is the error of a measurement."""
NUM_ROUNDS = {2048: 8, 65536: 5}


def compare(
    rows: RowWriter,
    batch_size: int,
    models: Sequence[str],
    peers: Mapping[str, str],
    min_ratios: Mapping[str, Mapping[str, float]],
) -> None:
    """Add the ratio to the peer of each dtype. A model that fails is a row."""
    training = make_workload(batch_size)
    samples = make_training_batches(training)
    for name in models:
        try:
            implementations = [*peers, *peers.values()]
            rates = measure(name, training, samples, NUM_ROUNDS[batch_size], "cuda", implementations)
        except Exception as error:
            traceback.print_exc()
            message = str(error).strip().partition("\n")[0]
            rows.holds(f"{name}, {batch_size:,}", False, f"{type(error).__name__}: {message}")
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        for dtype, peer in peers.items():
            quantity = f"{name}, {batch_size:,}, {dtype}"
            add_ratio(rows, quantity, rates[dtype], peer, rates[peer], min_ratios.get(dtype, {}).get(name))
            former = former_rates().get(result_case(name, batch_size, dtype, torch.cuda.get_device_name()))
            if former is not None:
                rows.at_least(
                    f"{quantity}: former", rates[dtype] / former, MIN_FORMER_RATIO, f"x {former:,.0f} samples/s"
                )


def add_ratio(
    rows: RowWriter, quantity: str, rate: float, peer: str, peer_rate: float, min_ratio: float | None
) -> None:
    unit = f"x {peer} ({rate:,.0f} and {peer_rate:,.0f} samples/s)"
    if min_ratio is None:
        rows.measured(quantity, rate / peer_rate, unit)
    else:
        rows.at_least(quantity, rate / peer_rate, min_ratio, unit)


def former_rates() -> dict[str, float]:
    """Return the last stored samples per second of each case."""
    with RESULTS.open(newline="") as file:
        return {line["case"]: float(line["value"]) for line in csv.DictReader(file) if line["benchmark"] == "models"}


def check_2048(rows: RowWriter) -> None:
    compare(rows, 2048, list(PLAIN), PEERS, MIN_RATIOS_2048)


def check_65536(rows: RowWriter) -> None:
    compare(rows, 65536, list(PLAIN), PEERS, MIN_RATIOS_65536)


def check_compiled(rows: RowWriter) -> None:
    for batch_size in (2048, 65536):
        compare(rows, batch_size, COMPILED, {"float32": "torch compiled"}, {})
