"""Time of a DLRM step, and the part of it in which the host is busy."""

from __future__ import annotations

import statistics
import time
from itertools import count, cycle

import torch
from common.packed_batches import PackedBatches
from common.timing import seconds
from gpu_path.training import NUM_BATCHES, Training, TrainingCase

from gpu_parts.rows import RowWriter
from meseta.train.running_metrics import StepPredictions

CASE = TrainingCase(model="dlrm", batch_size=2048, num_rows=100_000)
NUM_STEPS, NUM_ROUNDS, NUM_WARM_UP_STEPS = 100, 7, 20
MAX_STEP_MS, MAX_HOST_MS = 0.7, 0.3


class TimedSteps:
    """Steps of a training with packed batches. Predictions are copied for metrics, as in `meseta train`."""

    def __init__(self, training: Training, case: TrainingCase, device: str) -> None:
        self.batches = PackedBatches(cycle(range(NUM_BATCHES)), case.make_batch, torch.device(device))
        factors = (1 / number for number in count(1))
        self._steps = training.pipeline.steps(self.batches, schedule=factors.__next__)
        self._predictions: StepPredictions | None = None

    def __call__(self) -> None:
        result = next(self._steps)
        self._predictions = StepPredictions.start_copy(result.logits, result.batch, result.agreement)


def time_steps(steps: TimedSteps, num_steps: int) -> float:
    """Return milliseconds per step, until the device is idle."""
    steps.batches.pack(num_steps)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        steps()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start_s) / num_steps


def time_host(steps: TimedSteps) -> float:
    """Return milliseconds of the host in one step. The device is idle before, so that the host waits for no other."""
    steps.batches.pack(1)
    torch.cuda.synchronize()
    return 1e3 * seconds(steps)


def check(rows: RowWriter) -> None:
    steps = TimedSteps(Training(CASE, "cuda", uses_graphs=True), CASE, "cuda")
    time_steps(steps, NUM_WARM_UP_STEPS)
    step_ms = statistics.median(time_steps(steps, NUM_STEPS) for _ in range(NUM_ROUNDS))
    host_ms = statistics.median(time_host(steps) for _ in range(NUM_STEPS))
    rows.at_most("DLRM, 2,048, float32: step", step_ms, MAX_STEP_MS, "ms")
    rows.at_most("DLRM, 2,048, float32: host", host_ms, MAX_HOST_MS, "ms")
