"""Steps of one model on every rank, which `bench_clip_norm.py` times with and without `train.clip_norm`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from peers.e2e_meseta import make_batch, make_model, make_pipeline

from links import shapes
from meseta.comm import World
from meseta.measure.synthetic_batches import DlrmWorkload, make_training_batches
from meseta.optim.dense import GradientClipper
from meseta.pipeline import Pipeline, StepResult
from meseta.pipeline.clipping import clip_over_ranks

MAX_NORM = 1e30
"""Limit that no gradient reaches, so that all variants train identically."""
VARIANTS = ("no clipping", "no sum", "sum")
"""Names for `time_steps`. Without the sum, each rank computes the norm of the rows on it."""


@dataclass
class _State:
    pipeline: Pipeline
    steps: Iterator[StepResult]
    clips: dict[str, GradientClipper | None]


_states: list[_State] = []


def build(shape: DlrmWorkload, optimizer: str) -> None:
    """Create the model on this rank."""
    torch.set_num_threads(1)
    _states.clear()
    world = World.current()
    samples = make_training_batches(shape, world.rank, world.size)
    model = make_model(shape, optimizer, "float32", shapes.LR, shapes.INIT)
    pipeline = make_pipeline(model, shapes.LR, world)
    clip = clip_over_ranks(GradientClipper(norm=MAX_NORM, includes_rows=True), pipeline.world)
    clips = {"no clipping": None, "no sum": replace(clip, exchange=None), "sum": clip}
    _states.append(_State(pipeline, pipeline.steps(map(make_batch, cycle(samples))), clips))
    gc.collect()
    gc.freeze()


def time_steps(variant: str, num_steps: int) -> tuple[list[float], float]:
    """Return the seconds of each of `num_steps` steps, and the mean processor time of a step."""
    [state] = _states
    state.pipeline.clip = state.clips[variant]
    next(state.steps)  # It completes the last step of another variant.
    seconds, busy_s = [], time.process_time()
    for _ in range(num_steps):
        start_s = time.perf_counter()
        next(state.steps)
        seconds.append(time.perf_counter() - start_s)
    return seconds, (time.process_time() - busy_s) / num_steps
