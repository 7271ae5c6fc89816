"""Part 'hybrid': DHEN with 20 million dense parameters, sharded inside hosts, over all ranks, or replicated.

Links have 1 / 24 of the rate inside a host (arXiv 2203.11014, section 4).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from common.tables import table

from hosts import Hosts, bits_per_s
from links import shapes, training
from links.model import measured_link
from links.rank_pool import RankPool, on_hosts, start_ranks
from links.timing import Measured, Options, asker, in_turns
from links.variants import Layout, Variant
from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.measure.synthetic_batches import DlrmWorkload, make_training_batches
from meseta.models import DHEN, DHENShape
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline
from meseta.pipeline.overlap import choose_overlap
from meseta.telemetry.span import TransferTimes

SHAPE = DHENShape(num_layers=10, interactions={"dot": 18, "self_attention": 18, "linear": 18})
BOTTOM_MLP, TOP_MLP = (256,), (1024, 256)
"""Widths with 19,997,463 dense parameters, for 26 features of dimension 64."""


@dataclass(frozen=True)
class Way:
    """Placement of the dense part."""

    name: str
    sharding: str
    hosts: Layout
    """Layout of the plan."""
    exchange: str


def ways(layout: Layout) -> list[Way]:
    """Return the three placements: sharded inside hosts, sharded over all ranks, replicated."""
    return [
        Way("hybrid", "fsdp", layout, "hierarchical"),
        Way("fsdp over all", "fsdp", Layout(1, layout.size), "flat"),
        Way("replicated", "replicated", layout, "hierarchical"),
    ]


def make_model(shape: DlrmWorkload) -> DHEN:
    tables, features = shapes.specs(shape)
    return DHEN(
        EmbeddingBagCollection(tables, features),
        num_dense=shape.num_dense,
        bottom_mlp=BOTTOM_MLP,
        shape=SHAPE,
        top_mlp=TOP_MLP,
    )


def num_parameters(shape: DlrmWorkload) -> int:
    return sum(one.numel() for one in make_model(shape).parameters() if one.requires_grad)


def build(shape: DlrmWorkload, all_ways: Sequence[Way]) -> list[int]:
    """Create pipelines on all ranks. Returns the numbers of dense parameters of this rank."""
    torch.set_num_threads(1)
    held = []
    for way in all_ways:
        pipeline = make_pipeline(shape, way)
        training.keep(way.name, pipeline, make_training_batches(shape, pipeline.world.rank, pipeline.world.size))
        local_parts = [p.to_local() if isinstance(p, dist.tensor.DTensor) else p for p in pipeline.model.parameters()]
        held.append(sum(one.numel() for one in local_parts))
    return held


def make_pipeline(shape: DlrmWorkload, way: Way) -> Pipeline:
    """Create a pipeline with `pipeline.overlap: auto` and its own collectives."""
    world = replace(World.current(), transfers=TransferTimes())
    variant = Variant(exchange=way.exchange)
    plan, comm = shapes.plan(shape, variant, way.hosts), shapes.communication(variant)
    model: Any = shard(make_model(shape), plan, world=world, dense=way.sharding, comm=comm)
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name="adam", lr=shapes.LR), model.parameters())
    return Pipeline(model, optimizer, world, overlap=choose_overlap("auto", model, world).hidden)


BATCH = 512
INSIDE_OVER_ACROSS = 24.0
FIRST_RATE = "1gbit"
SIZES = (1_048_576, 4_194_304, 16_777_216)
AT_LEAST, BYTES_LIMIT = 1.5, 0.05
NUMBER_BYTES, ID_BYTES = 4, 8
HYBRID, BASE = "hybrid", "fsdp over all"


def dense_bytes(way: Way, layout: Layout, parameter_bytes: float) -> float:
    """Return the mean bytes that leave a host in a step.

    With H hosts of L ranks, R = H L, and P bytes of parameters, a sum over hosts sends 2 (H - 1) / H P. If parameters
    are sharded over all ranks, each of two ring gathers sends (R - 1) / R P over the link of a host. Each rank sends
    gradients to R - L other ranks: L (R - L) / R P.
    """
    ranks, per_host = layout.size, layout.per_host
    if way.hosts == layout:
        return 2 * (layout.hosts - 1) / layout.hosts * parameter_bytes
    return (2 * (ranks - 1) / ranks + per_host * (ranks - per_host) / ranks) * parameter_bytes


def table_bytes(shape: shapes.DlrmWorkload, layout: Layout) -> float:
    """Return the bytes of ids, bags and gradients of bags."""
    crossing = shape.lookups.batch_size * len(shape.lookups.rows) * (layout.hosts - 1) / layout.hosts / layout.hosts
    return crossing * (ID_BYTES + 2 * NUMBER_BYTES * shape.dim)


def measure_hybrid(layout: Layout, options: Options) -> bool:
    shape, all_ways = shapes.training(64 if options.quick else BATCH), ways(layout)
    number = num_parameters(shape)
    print(f"\n{layout}: DHEN of {number:,} dense parameters, global batch {shape.lookups.batch_size}; "
          f"{layout.size} ranks of one thread on {os.cpu_count()} processors", flush=True)  # fmt: skip
    measured = Measured()
    with (
        Hosts(layout.hosts, ranks=layout.per_host, across=FIRST_RATE) as hosts,
        start_ranks(layout.size, on_hosts(hosts)) as ranks,
    ):
        rate = set_rate(ranks, hosts, layout, options)
        held = ranks.ask(build, shape=shape, all_ways=all_ways)
        asked = {way.name: asker(ranks, training.window, way.name) for way in all_ways}
        in_turns(asked, options.rounds, options.window_s, measured)
    most = {way.name: max(of_rank[place] for of_rank in held) for place, way in enumerate(all_ways)}
    computed = {
        way.name: dense_bytes(way, layout, NUMBER_BYTES * number) + table_bytes(shape, layout) for way in all_ways
    }
    return _tell(layout, rate, computed, most, measured, options)


def _tell(
    layout: Layout,
    rate: str,
    computed: Mapping[str, float],
    held: Mapping[str, int],
    measured: Measured,
    options: Options,
) -> bool:
    rows, good, base = [], True, measured.step_s(BASE)
    for name, num_bytes in computed.items():
        step_s, sent = measured.step_s(name), statistics.mean(measured.link_bytes(name, layout))
        rounds = zip(measured.windows[name], measured.windows[BASE], strict=True)
        each = [b[0].seconds / b[0].num_steps / (a[0].seconds / a[0].num_steps) for a, b in rounds]
        error, at_rate = sent / num_bytes - 1, 8 * sent / bits_per_s(rate)
        is_met = abs(error) <= BYTES_LIMIT and (name != HYBRID or base / step_s >= AT_LEAST)
        good &= is_met
        rows.append([
            name, f"{1e3 * step_s:.0f}", f"{base / step_s:.2f}", f"{min(each):.2f} to {max(each):.2f}",
            f"{sent / 1e6:.2f}", f"{num_bytes / 1e6:.2f}", f"{error:+.2%}", f"{1e3 * at_rate:.0f}",
            f"{held[name]:,}",
            "yes" if is_met else "NO",
        ])  # fmt: skip
        case = f"{layout} {name}, {rate}"
        if name != BASE:
            options.record(case, "step", step_s, "s", peer=BASE, peer_value=base)
        options.record(case, "bytes across", sent, "bytes", peer="computed", peer_value=num_bytes)
    head = ("dense part", "step, ms", f"{BASE} over it", "by round", "MB a host", "computed", "error", "link busy, ms",
            "numbers a rank", "met")  # fmt: skip
    table(f"DHEN, {layout}, links of {rate}, medians of {options.rounds} rounds in turns (hybrid at least {AT_LEAST} "
          f"times as fast, bytes within {BYTES_LIMIT:.0%})", head, rows)  # fmt: skip
    return good


def set_rate(ranks: RankPool, hosts: Hosts, layout: Layout, options: Options) -> str:
    """Limit links to 1 / 24 of the rate inside a host, and return it."""
    sizes, calls = SIZES[:2] if options.quick else SIZES, 3 if options.quick else 9
    inside, across = 0.0, 0.0
    for level in ("inside", "across"):
        reached = layout.per_host * measured_link(ranks, layout, level, "all_to_all", sizes, calls).bytes_per_s
        if level == "inside":
            inside = reached
            hosts.reshape(f"{8 * inside / INSIDE_OVER_ACROSS / 1e6:.1f}mbit")
        across = reached
    print(f"{layout}: ranks of a host send each other {8 * inside / 1e6:,.0f} Mbit/s; a host's link lets "
          f"{hosts.across} through, of which they reach {8 * across / 1e6:,.0f}: 1 / {inside / across:.1f}",
          flush=True)  # fmt: skip
    return hosts.across
