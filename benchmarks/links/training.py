"""Models of all variants on every rank, in one process group."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

import torch
from peers.e2e_meseta import make_batch, make_model

from hosts import own_traffic
from links import shapes
from links.variants import Layout, Variant, Window
from meseta.comm import World
from meseta.config import DenseOptimizerConfig
from meseta.embedding import shard
from meseta.measure.synthetic_batches import DlrmWorkload, TrainingBatch, make_training_batches
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline, StepResult
from meseta.telemetry.span import TransferTimes

_pipelines: dict[str, Pipeline] = {}
_steps: dict[str, Iterator[StepResult]] = {}


def build(shape: DlrmWorkload, layout: Layout, variants: Sequence[Variant]) -> None:
    """Create models on all ranks, in addition to existing ones."""
    torch.set_num_threads(1)
    world = World.current()
    samples = make_training_batches(shape, world.rank, world.size)
    for variant in variants:
        if variant.name not in _steps:
            keep(variant.name, make_pipeline(shape, layout, variant, world), samples)


def keep(name: str, pipeline: Pipeline, samples: Sequence[TrainingBatch]) -> None:
    _pipelines[name] = pipeline
    _steps[name] = pipeline.steps(map(make_batch, cycle(samples)))
    gc.collect()
    gc.freeze()


def make_pipeline(shape: DlrmWorkload, layout: Layout, variant: Variant, world: World) -> Pipeline:
    model: Any = make_model(shape, "sgd", "float32", shapes.LR, shapes.INIT)
    path = cast(Any, variant.sum_path)
    world = replace(world, plan_ranks_per_host=layout.per_host, sum_algorithm=path, transfers=TransferTimes())
    plan, comm = shapes.plan(shape, variant, layout), shapes.communication(variant)
    model = shard(model, plan, world=world, comm=comm)
    optimizer = make_dense_optimizer(DenseOptimizerConfig(name="sgd", lr=shapes.LR), model.parameters())
    pipeline = Pipeline(
        cast(Any, model), optimizer, world, accumulate_steps=variant.accumulate_steps, overlap=variant.overlap
    )
    pipeline.uses_stale_embeddings = variant.stale
    return pipeline


def window(name: str, num_steps: int) -> Window:
    """Time steps between barriers."""
    pipeline, steps = _pipelines[name], _steps[name]
    world, transfers = pipeline.world, pipeline.world.transfers
    transfers.pop_means()
    pipeline.stage_times.pop_means()
    world.barrier()
    before, busy_s = own_traffic(), time.process_time()
    world.barrier()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        next(steps)
    pipeline.synchronize()
    world.barrier()
    seconds, busy_s = time.perf_counter() - start_s, time.process_time() - busy_s
    sent = own_traffic().since(before)
    world.barrier()
    means = transfers.pop_means()
    return Window(
        num_steps=num_steps,
        seconds=seconds,
        busy_s=busy_s,
        waited_s=num_steps * sum(one.wait_s for one in means.values()),
        sent_bytes=sent.payload_bytes,
        across={key: one.inter_host_bytes for key, one in means.items()},
        waits={key: one.wait_s for key, one in means.items()},
        stages=pipeline.stage_times.pop_means(),
    )


def time_before(name: str, num_calls: int) -> float:
    """Return the median seconds of the computation that needs dense inputs only."""
    pipeline, times = _pipelines[name], list[float]()
    model: Any = pipeline.model
    assert pipeline.batch is not None
    for _ in range(num_calls):
        pipeline.world.barrier()
        start_s = time.perf_counter()
        model.forward_dense(pipeline.batch.dense)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)
