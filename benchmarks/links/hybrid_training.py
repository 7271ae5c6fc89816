"""DHEN of 20 million dense parameters on every rank of a crew, its dense part whole or cut in one of two ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from links import shapes, training
from links.variants import Layout, Variant
from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.measure.synthetic_batches import DlrmWorkload, make_training_batches
from meseta.models import DHEN, DHENShape
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline
from meseta.pipeline.overlap import choose_overlap
from meseta.telemetry.span import TransferSpan, TransferTimes

SHAPE = DHENShape(num_layers=10, interactions={"dot": 18, "self_attention": 18, "linear": 18})
BOTTOM_MLP, TOP_MLP = (256,), (1024, 256)
"""With 26 features of width 64: 19,997,463 parameters."""
GATHER = "parameters"
"""As meseta.spec.transfer calls what is gathered."""


@dataclass(frozen=True)
class Way:
    """Where the dense part lies."""

    name: str
    sharding: str
    hosts: Layout
    """As the plan tells them."""
    exchange: str


def ways(layout: Layout) -> list[Way]:
    """Cut inside a host and alike on all, cut over all ranks as if they were one host, and whole on every rank."""
    return [
        Way("hybrid", "fsdp", layout, "hierarchical"),
        Way("fsdp over all", "fsdp", Layout(1, layout.size), "flat"),
        Way("replicated", "replicated", layout, "hierarchical"),
    ]


def make_model(shape: DlrmWorkload) -> DHEN:
    """The same on every rank."""
    tables, features = shapes.specs(shape)
    return DHEN(
        EmbeddingBagCollection(tables, features),
        num_dense=shape.num_dense,
        bottom_mlp=BOTTOM_MLP,
        shape=SHAPE,
        top_mlp=TOP_MLP,
    )


def num_parameters(shape: DlrmWorkload) -> int:
    """Dense ones of the model."""
    return sum(one.numel() for one in make_model(shape).parameters() if one.requires_grad)


def build(shape: DlrmWorkload, all_ways: Sequence[Way]) -> list[int]:
    """Pipelines of these ways; of each the numbers of dense parameters that this rank keeps. Collective."""
    torch.set_num_threads(1)
    held = []
    for way in all_ways:
        pipeline = make_pipeline(shape, way)
        training.keep(way.name, pipeline, make_training_batches(shape, pipeline.world.rank, pipeline.world.size))
        own = [p.to_local() if isinstance(p, dist.tensor.DTensor) else p for p in pipeline.model.parameters()]
        held.append(sum(one.numel() for one in own))
    return held


def make_pipeline(shape: DlrmWorkload, way: Way) -> Pipeline:
    """The steps of one way, which hide what a run hides, with transfers of their own."""
    world = replace(World.current(), transfers=TransferTimes())
    variant = Variant(exchange=way.exchange)
    plan, comm = shapes.plan(shape, variant, way.hosts), shapes.communication(variant)
    model: Any = shard(make_model(shape), plan, world=world, dense=way.sharding, comm=comm)
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name="adam", lr=shapes.LR), model.parameters())
    pipeline = Pipeline(model, optimizer, world, overlap=choose_overlap("auto", model, world).hidden)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(TimedGather(pipeline.world))
    return pipeline


class TimedGather:
    """What `fully_shard` gathers by, and a span of each gather: torch waits for one before it begins another."""

    def __init__(self, world: World) -> None:
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Done when it returns."""
        begin_s, peers = time.perf_counter(), dist.get_world_size(group) - 1
        dist.all_gather_into_tensor(output_tensor, input_tensor, group)
        done_s, transfers, sent = time.perf_counter(), self._world.transfers, float(peers * input_tensor.nbytes)
        transfers.add(TransferSpan(GATHER, transfers.step, peers, sent, 0.0, begin_s, done_s, done_s - begin_s))
