"""What every rank of a crew does: models of all variants in one process group, and windows of steps of each."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from hosts.links import LinkTraffic

from hosts import own_traffic
from links import shapes
from links.variants import Layout, Variant, Window
from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.data import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.jagged import KeyedJaggedTensor
from meseta.measure.traffic import Samples, Training, make_samples
from meseta.models import DLRM
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import TrainStep
from meseta.telemetry.transfers import TransferTimes

_steps: dict[str, TrainStep] = {}
_samples: list[Samples] = []
_calls: dict[str, int] = {}
NOTHING = LinkTraffic(0, 0, 0, 0, 0)


def takes_codecs() -> bool:
    """Whether `meseta.shard` can be told how numbers travel."""
    return "comm" in inspect.signature(shard).parameters


def build(shape: Training, layout: Layout, variants: Sequence[Variant]) -> None:
    """Models of these variants, beside those that are there. Collective."""
    torch.set_num_threads(1)
    world = World.current()
    _samples[:] = make_samples(shape, world.rank, world.size)
    for variant in variants:
        if variant.name not in _steps:
            _steps[variant.name] = make_step(shape, layout, variant, world)
            _calls[variant.name] = 0
    gc.collect()
    gc.freeze()


def forget(names: Sequence[str]) -> None:
    """Give the memory of variants back."""
    for name in names:
        del _steps[name]
    gc.unfreeze()
    gc.collect()


def make_step(shape: Training, layout: Layout, variant: Variant, world: World) -> TrainStep:
    """The step of one variant, with transfers of its one."""
    tables, features = shapes.specs(shape)
    model = DLRM(
        EmbeddingBagCollection(tables, features),
        num_dense=shape.num_dense,
        bottom_mlp=(*shape.bottom_mlp, shape.dim),
        top_mlp=shape.top_mlp,
    )
    path = cast(Any, variant.sum_path)
    world = replace(world, per_host=layout.per_host, sum_path=path, transfers=TransferTimes())
    more: dict[str, Any] = {"comm": shapes.communication(variant)} if takes_codecs() else {}
    model = shard(model, shapes.plan(shape, variant, layout), world=world, **more)
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name="sgd", lr=shapes.LR), model.parameters())
    return TrainStep(cast(Any, model), optimizer, world)


def window(name: str, num_steps: int, counted: bool = True) -> Window:
    """Steps of one variant, between barriers of all ranks; `counted`: on hosts that have a link."""
    step = _steps[name]
    world, transfers = step.world, step.world.transfers
    transfers.take()
    world.barrier()
    before, busy_s = own_traffic() if counted else NOTHING, time.process_time()
    world.barrier()
    start_s, first = time.perf_counter(), _calls[name]
    for call in range(first, first + num_steps):
        step(make_batch(_samples[call % len(_samples)]))
    world.barrier()
    seconds, busy_s = time.perf_counter() - start_s, time.process_time() - busy_s
    sent = (own_traffic() if counted else NOTHING).since(before)
    world.barrier()
    _calls[name] += num_steps
    means = transfers.take()
    return Window(
        num_steps=num_steps,
        seconds=seconds,
        busy_s=busy_s,
        waited_s=num_steps * sum(one.waited_s for one in means.values()),
        sent_bytes=sent.payload_bytes,
        resent_packets=sent.resent_packets,
        across={key: one.across_bytes for key, one in means.items()},
    )


def make_batch(samples: Samples) -> Batch:
    """As the reader gives it: the KeyedJaggedTensor is new in every step."""
    num_features, batch_size, bag_size = samples.ids.shape
    sparse = KeyedJaggedTensor(
        keys=tuple(f"f{f}" for f in range(num_features)),
        values=torch.from_numpy(samples.ids.reshape(-1)),
        lengths=torch.full((num_features * batch_size,), bag_size),
    )
    return Batch(dense=torch.from_numpy(samples.dense), sparse=sparse, label=torch.from_numpy(samples.label))
