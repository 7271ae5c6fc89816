"""What every rank of a crew does: models of all variants in one process group, and windows of steps of each."""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
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
from meseta.measure.synthetic_batches import DlrmWorkload, TrainingBatch, make_training_batches
from meseta.models import DLRM
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline, StepResult
from meseta.sparse import KeyedJaggedTensor
from meseta.telemetry.span import TransferTimes

_pipelines: dict[str, Pipeline] = {}
_steps: dict[str, Iterator[StepResult]] = {}
NOTHING = LinkTraffic(0, 0, 0, 0, 0)


def takes_codecs() -> bool:
    """Whether `meseta.shard` can be told how numbers travel."""
    return "comm" in inspect.signature(shard).parameters


def build(shape: DlrmWorkload, layout: Layout, variants: Sequence[Variant]) -> None:
    """Models of these variants, beside those that are there. Collective."""
    torch.set_num_threads(1)
    world = World.current()
    samples = make_training_batches(shape, world.rank, world.size)
    for variant in variants:
        if variant.name not in _steps:
            keep(variant.name, make_pipeline(shape, layout, variant, world), samples)


def keep(name: str, pipeline: Pipeline, samples: Sequence[TrainingBatch]) -> None:
    """A pipeline of which `window` times steps, of these samples in turns."""
    _pipelines[name] = pipeline
    _steps[name] = pipeline.steps(map(make_batch, cycle(samples)))
    gc.collect()
    gc.freeze()


def forget(names: Sequence[str]) -> None:
    """Give the memory of variants back."""
    for name in names:
        del _steps[name], _pipelines[name]
    gc.unfreeze()
    gc.collect()


def make_pipeline(shape: DlrmWorkload, layout: Layout, variant: Variant, world: World) -> Pipeline:
    """The steps of one variant, with transfers of their own."""
    tables, features = shapes.specs(shape)
    model = DLRM(
        EmbeddingBagCollection(tables, features),
        num_dense=shape.num_dense,
        bottom_mlp=(*shape.bottom_mlp, shape.dim),
        top_mlp=shape.top_mlp,
    )
    path = cast(Any, variant.sum_path)
    world = replace(world, plan_ranks_per_host=layout.per_host, sum_algorithm=path, transfers=TransferTimes())
    more: dict[str, Any] = {"comm": shapes.communication(variant)} if takes_codecs() else {}
    model = shard(model, shapes.plan(shape, variant, layout), world=world, **more)
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name="sgd", lr=shapes.LR), model.parameters())
    pipeline = Pipeline(
        cast(Any, model), optimizer, world, accumulate_steps=variant.accumulate_steps, overlap=variant.overlap
    )
    pipeline.uses_stale_embeddings = variant.stale
    return pipeline


def window(name: str, num_steps: int, counted: bool = True) -> Window:
    """Steps of one variant, between barriers of all ranks; `counted`: on hosts that have a link."""
    pipeline, steps = _pipelines[name], _steps[name]
    world, transfers = pipeline.world, pipeline.world.transfers
    transfers.pop_means()
    pipeline.stage_times.pop_means()
    world.barrier()
    before, busy_s = own_traffic() if counted else NOTHING, time.process_time()
    world.barrier()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        next(steps)
    pipeline.synchronize()
    world.barrier()
    seconds, busy_s = time.perf_counter() - start_s, time.process_time() - busy_s
    sent = (own_traffic() if counted else NOTHING).since(before)
    world.barrier()
    means = transfers.pop_means()
    return Window(
        num_steps=num_steps,
        seconds=seconds,
        busy_s=busy_s,
        waited_s=num_steps * sum(one.wait_s for one in means.values()),
        sent_bytes=sent.payload_bytes,
        resent_packets=sent.resent_packets,
        across={key: one.inter_host_bytes for key, one in means.items()},
        waits={key: one.wait_s for key, one in means.items()},
        stages=pipeline.stage_times.pop_means(),
    )


def time_before(name: str, num_calls: int) -> float:
    """Seconds of what the model makes of dense inputs alone, the median of some calls."""
    pipeline, times = _pipelines[name], list[float]()
    model: Any = pipeline.model
    assert pipeline.batch is not None
    for _ in range(num_calls):
        pipeline.world.barrier()
        start_s = time.perf_counter()
        model.forward_dense(pipeline.batch.dense)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def make_batch(samples: TrainingBatch) -> Batch:
    """As the reader gives it: the KeyedJaggedTensor is new in every step."""
    num_features, batch_size, bag_size = samples.ids.shape
    sparse = KeyedJaggedTensor(
        keys=tuple(f"f{f}" for f in range(num_features)),
        values=torch.from_numpy(samples.ids.reshape(-1)),
        lengths=torch.full((num_features * batch_size,), bag_size),
    )
    return Batch(dense=torch.from_numpy(samples.dense), sparse=sparse, label=torch.from_numpy(samples.label))
