"""Speed of the models relative to the same models in torch modules."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence

import torch
from bench_models import make_workload, measure
from peers.plain_models import PLAIN

from gpu_parts.rows import RowWriter
from meseta.measure.synthetic_batches import make_training_batches

PEERS = {"float32": "torch", "bfloat16": "torch autocast"}
COMPILED = ("dlrm", "dcnv2")
MIN_RATIOS_2048 = {"float32": dict.fromkeys(PLAIN, 3.0) | {"dlrm": 5.0, "dcnv2": 5.0}}
MIN_RATIOS_65536 = {
    # Limits of wukong and dhen are set after their first measurement.
    "float32": {name: 1.1 for name in PLAIN if name not in ("wukong", "dhen")} | {"masknet": 1.0},
    "bfloat16": dict.fromkeys(PLAIN, 1.1),
}
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
            add_ratio(rows, f"{name}, {batch_size:,}, {dtype}", rates[dtype], peer, rates[peer],
                      min_ratios.get(dtype, {}).get(name))  # fmt: skip


def add_ratio(
    rows: RowWriter, quantity: str, rate: float, peer: str, peer_rate: float, min_ratio: float | None
) -> None:
    unit = f"x {peer} ({rate:,.0f} and {peer_rate:,.0f} samples/s)"
    if min_ratio is None:
        rows.measured(quantity, rate / peer_rate, unit)
    else:
        rows.at_least(quantity, rate / peer_rate, min_ratio, unit)


def check_2048(rows: RowWriter) -> None:
    compare(rows, 2048, list(PLAIN), PEERS, MIN_RATIOS_2048)


def check_65536(rows: RowWriter) -> None:
    compare(rows, 65536, list(PLAIN), PEERS, MIN_RATIOS_65536)


def check_compiled(rows: RowWriter) -> None:
    for batch_size in (2048, 65536):
        compare(rows, batch_size, COMPILED, {"float32": "torch compiled"}, {})
