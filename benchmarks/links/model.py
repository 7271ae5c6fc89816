"""Cost model of a testbed, whose links are measured between its ranks like in `meseta calibrate`."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from peers.e2e_meseta import make_batch

from hosts import Hosts
from links import shapes, training
from links.rank_pool import RankPool
from links.timing import Options
from links.variants import Layout, Variant
from meseta.measure.calibrate.calibration import fit_link
from meseta.measure.synthetic_batches import DlrmWorkload, make_training_batches
from meseta.planner import documented_cost_model, predict
from meseta.spec import CostModel, Link, Topology

SIZES = (16_384, 131_072, 1_048_576, 4_194_304)
PRODUCT = (512, 512, 256)


def calibrated(
    ranks: RankPool, hosts: Hosts, shape: DlrmWorkload, layout: Layout, options: Options
) -> tuple[CostModel, Topology]:
    """Measure links, matrix products and steps without operators on all ranks simultaneously. Other costs are
    documented ones."""
    sizes = SIZES[:3] if options.quick else SIZES
    calls = 3 if options.quick else 7
    links = {
        (level, kind): measured_link(ranks, layout, level, kind, sizes, calls)
        for level in ("inside", "across")
        for kind in ("all_to_all", "all_reduce")
    }
    crowd = max(layout.size / (os.cpu_count() or 1), 1.0)
    known = documented_cost_model("cpu")
    product_s = max(ranks.ask(time_product, shape=PRODUCT, num_rounds=9))
    m, k, n = PRODUCT
    exchange = replace(
        _slower(known.exchange, crowd),
        inside_all_to_all=links["inside", "all_to_all"],
        inside_all_reduce=links["inside", "all_reduce"],
        across_all_to_all=links["across", "all_to_all"],
        across_all_reduce=links["across", "all_reduce"],
        measured=True,
        source=f"links, products and a step alone measured on the testbed, operators documented for one thread x "
        f"{crowd:g}",
    )
    dense = replace(known.dense, float32_flops_per_s=2.0 * m * k * n / product_s, call_s=0.0)
    model = replace(
        known, exchange=exchange, dense=dense, lookup=_slower(known.lookup, crowd), update=_slower(known.update, crowd)
    )
    alone = Layout(1, 1)
    share = shapes.training(shape.lookups.batch_size // layout.size)
    plan, load = shapes.plan(share, Variant(), alone), shapes.workload(share, Variant())
    operators_s = predict(plan, load, Topology(num_hosts=1, devices_per_host=1), model).step_s
    step_s = max(ranks.ask(time_alone, shape=share, num_steps=3 if options.quick else 9))
    model = replace(model, dense=replace(dense, call_s=max(step_s - operators_s, 0.0)))
    print(f"  a step of {share.lookups.batch_size} samples without other ranks: {1e3 * step_s:.0f} ms, of which "
          f"operators {1e3 * operators_s:.0f} ms")  # fmt: skip
    for (level, kind), link in links.items():
        print(f"  {level} {kind}: {8 * link.bytes_per_s / 1e6:.0f} Mbit/s a rank, {1e3 * link.latency_s:.2f} ms")
    of_link = hosts.rate / 8 / layout.per_host
    print(f"  products: {dense.float32_flops_per_s / 1e9:.1f} GFLOP/s a rank; a rank's share of a link: "
          f"{8 * of_link / 1e6:.0f} Mbit/s", flush=True)  # fmt: skip
    return model, Topology(num_hosts=layout.hosts, devices_per_host=layout.per_host)


def _slower(group: Any, factor: float) -> Any:
    """Scale constants of operators for shared processors."""
    changed: dict[str, Any] = {}
    for entry in fields(group):
        value = getattr(group, entry.name)
        if entry.name.endswith("_s") and isinstance(value, float):
            changed[entry.name] = value * factor
        elif isinstance(value, Mapping):
            changed[entry.name] = {key: number * factor for key, number in value.items()}
    return replace(group, **changed)


def measured_link(ranks: RankPool, layout: Layout, level: str, kind: str, sizes: tuple[int, ...], calls: int) -> Link:
    seconds = [
        float(np.median(ranks.ask(time_collective, level=level, kind=kind, per_host=layout.per_host, num_bytes=size,
                                  num_calls=calls)))
        for size in sizes
    ]  # fmt: skip
    hosts = layout.hosts
    share = {
        ("inside", "all_reduce"): 2 * (layout.per_host - 1) / layout.per_host,
        ("across", "all_reduce"): 2 / layout.per_host * (hosts - 1) / hosts,
    }.get((level, kind), 1.0)
    return fit_link(np.array(sizes, np.float64) * share, np.array(seconds))


def time_collective(level: str, kind: str, per_host: int, num_bytes: int, num_calls: int) -> float:
    """Return the lower quartile of seconds of a collective."""
    from dataclasses import replace as changed

    import torch

    from meseta.comm import World

    world = changed(World.current(), plan_ranks_per_host=per_host, sum_algorithm="cross_host")
    name, first = "measurement", world.rank - world.rank % per_host
    mates = range(first, first + per_host)
    if kind == "all_reduce" and level == "across":
        buffer = torch.zeros(num_bytes // 4)
        call: Any = partial(world.all_reduce, buffer, name)
    elif kind == "all_reduce":
        pieces = torch.zeros(per_host, num_bytes // 4 // per_host)
        total = torch.zeros(pieces.shape[1])

        def call() -> None:
            for _ in range(2):  # there and back
                world.reduce_scatter_intra_host(total, pieces, name)

    else:
        others = [r for r in range(world.size) if (r in mates) == (level == "inside") and r != world.rank]
        each = num_bytes // 4 // len(others)
        splits = [each if r in others else 0 for r in range(world.size)]
        buffer = torch.zeros(sum(splits))
        call = lambda: world.all_to_all(buffer, splits, splits, name).wait()  # noqa: E731
    return _quartile(call, num_calls, world.barrier)


def time_product(shape: tuple[int, int, int], num_rounds: int) -> float:
    """Return the seconds of [m, k] @ [k, n], computed on all ranks simultaneously."""
    import torch

    m, k, n = shape
    left, right = torch.randn(m, k), torch.randn(k, n)
    return _quartile(lambda: [torch.mm(left, right) for _ in range(40)], num_rounds, lambda: None) / 40


def time_alone(shape: DlrmWorkload, num_steps: int) -> float:
    """Return the median seconds of a step of a model that every rank trains alone."""
    from meseta.comm import World

    step = training.make_pipeline(shape, Layout(1, 1), Variant(), World.single())
    samples = make_training_batches(shape, 0, 1)
    batches = iter([make_batch(samples[call % len(samples)]) for call in range(num_steps + 1)])
    return statistics.median(_seconds(lambda: step(next(batches)), num_steps, World.current().barrier))


def _quartile(call: Any, num_calls: int, barrier: Any) -> float:
    return sorted(_seconds(call, num_calls, barrier))[(num_calls - 1) // 4]


def _seconds(call: Any, num_calls: int, barrier: Any) -> list[float]:
    """Return the seconds of each call after the first."""
    import time

    spent = []
    for _ in range(num_calls + 1):
        barrier()
        start_s = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start_s)
    return spent[1:]
