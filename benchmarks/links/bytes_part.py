"""Part 'bytes': kernel counters of the links compared with predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hosts import Hosts
from links import shapes, training
from links.rank_pool import on_hosts, start_ranks
from links.timing import Options, table
from links.variants import Layout, Variant, Window
from meseta.planner import predict
from meseta.spec import Topology

LIMIT = 0.01
BATCH = 8192
SCHEMES = ("table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid")
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "paper")


def variants(layout: Layout) -> list[Variant]:
    listed = [Variant(sharding=name, exchange=way) for name in SCHEMES for way in ("flat", "hierarchical")]
    listed += [
        Variant(sharding=name, exchange="hierarchical", dense_path="chain") for name in ("table_wise", "data_parallel")
    ]
    listed += [
        Variant(sharding=name, exchange=way, precision=precision)
        for precision in PRECISIONS[1:]
        for name in SCHEMES
        for way in ("flat", "hierarchical")
    ]
    return listed


def predicted_bytes(shape: shapes.DlrmWorkload, variant: Variant, layout: Layout) -> list[float]:
    """Return the predicted bytes that leave each host in a step."""
    topology = Topology(num_hosts=layout.hosts, devices_per_host=layout.per_host)
    prediction = predict(shapes.plan(shape, variant, layout), shapes.workload(shape, variant), topology)
    by_rank = np.sum([one.sent_inter_host for one in prediction.collectives], axis=0)
    return [float(one) for one in by_rank.reshape(layout.hosts, layout.per_host).sum(axis=1)]


def measure_bytes(layout: Layout, options: Options, rate: str = "2gbit") -> bool:
    """Measure one layout. Returns whether all errors are within LIMIT."""
    shape = shapes.training(BATCH)
    chosen = variants(layout)
    if options.quick:
        chosen = [one for one in chosen if one.sharding in ("table_wise", "row_wise") and not one.dense_path][:4]
    num_steps = 2 if options.quick else 4
    rows, good = [], True
    with (
        Hosts(layout.hosts, ranks=layout.per_host, across=rate) as hosts,
        start_ranks(layout.size, on_hosts(hosts)) as ranks,
    ):
        for variant in chosen:
            ranks.ask(training.build, shape=shape, layout=layout, variants=[variant])
            ranks.ask(training.window, name=variant.name, num_steps=1)
            windows = ranks.ask(training.window, name=variant.name, num_steps=num_steps)
            ranks.ask(training.forget, names=[variant.name])
            row, error = _compare(windows, predicted_bytes(shape, variant, layout), layout)
            rows.append([variant.name, *row])
            good &= abs(error) <= LIMIT
            options.record(
                f"{layout} {variant.name}", "bytes across", sum(one.sent_bytes for one in windows[:: layout.per_host])
                / num_steps, "bytes", peer="predicted", peer_value=sum(predicted_bytes(shape, variant, layout)),
            )  # fmt: skip
    head = ("variant", "kernel, MB a step", "predicted", "kernel / predicted - 1", "worst host", "counts, KB",
            "beyond transfers, KB", "sent again")  # fmt: skip
    table(f"Bytes across hosts, {layout}, global batch {BATCH}, {num_steps} steps (within {LIMIT:.0%})", head, rows)
    return good


def _compare(windows: Sequence[Window], predicted: Sequence[float], layout: Layout) -> tuple[list[str], float]:
    """Return the cells of a row, and the error of the prediction."""
    first = windows[:: layout.per_host]
    counted = [one.sent_bytes / one.num_steps for one in first]
    sent_by_ranks = sum(sum(one.across.values()) for one in windows)
    counts = sum(one.across.get(name, 0.0) for one in windows for name in ("counts",))
    error = sum(counted) / sum(predicted) - 1
    worst = max((a / b - 1 for a, b in zip(counted, predicted, strict=True)), key=abs)
    resent = sum(one.resent_packets for one in first)
    cells = [f"{sum(counted) / 1e6:.3f}", f"{sum(predicted) / 1e6:.3f}", f"{error:+.2%}", f"{worst:+.2%}"]
    return [*cells, f"{counts / 1e3:.1f}", f"{(sum(counted) - sent_by_ranks) / 1e3:.1f}", str(resent)], error
