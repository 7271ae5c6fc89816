"""Metrics and lines of metrics.jsonl in a background thread, to which training hands over predictions and labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.pipeline.update_check import LossAgreement
from meseta.system.background import BackgroundJobs
from meseta.train.daily.epoch_metrics import EpochMetrics
from meseta.train.running_metrics import RunningMetrics, StepPredictions

HANDOVER_SAMPLES = 1 << 16
"""Number of samples after which the predictions of steps are handed over, because waking a thread takes time."""
MAX_PENDING_JOBS = 8
"""Number of handovers and lines that may be pending. Training waits if a slow disk delays the thread further."""


class BackgroundMetrics:
    """Thread of each rank that adds predictions to `RunningMetrics`. That of rank 0 also computes and writes lines.

    Every rank has one, and all ranks make the same calls.
    """

    # Windows are gathered by the caller. The threads would call collectives in another order on each rank.

    def __init__(self, metrics: RunningMetrics, world: World, epoch_metrics: EpochMetrics | None = None) -> None:
        self._metrics, self._world = metrics, world
        self.epoch_metrics = epoch_metrics
        """Metrics that also receive all predictions. Set them before the first step."""
        self._jobs = BackgroundJobs("meseta-metrics", MAX_PENDING_JOBS)
        self._steps: list[StepPredictions] = []
        self._codes: list[NDArray[np.int64]] = []
        self._num_samples = 0

    def add(self, logits: Tensor, batch: Batch, agreement: LossAgreement | None = None) -> None:
        """Add this rank's logits [B] or [B, T] of a step, with its slice and the agreed loss terms.

        The logits are not copied on a CPU, so they must not change. On a GPU, the agreement of the previous step must
        have been checked.
        """
        if self._num_samples >= HANDOVER_SAMPLES:
            self._hand_over()
        self._steps.append(StepPredictions.start_copy(logits, batch, agreement))
        if self.epoch_metrics is not None:
            self._codes.append(self.epoch_metrics.codes(batch))
        self._num_samples += batch.batch_size

    def start_line(self) -> Callable[[], dict[str, Any]]:
        """End the window of a line, and start that of the next. Return a function that computes the metrics of the
        line. Collective.

        Pass a function that calls it to `write`, before the next call of `add`. Raises the error of an earlier line on
        all ranks.
        """
        if self._world.size > 1:
            self.wait()
            return partial(self._metrics.compute_line, self._metrics.pop_windows())
        self._hand_over()
        self._raise_error()
        return lambda: self._metrics.compute_line(self._metrics.pop_windows())

    def write(self, write_line: Callable[[], object]) -> None:
        """Call `write_line` in the thread of rank 0 after all earlier lines were written."""
        if self._world.rank == 0:
            self._jobs.submit(write_line)

    def wait(self) -> None:
        """Wait until all predictions were added and all lines written. Collective. Raises the error of a line on all
        ranks."""
        self._hand_over()
        self._jobs.wait()
        if self._world.rank != 0:
            self._raise_error()
        self._world.broadcast_from_rank_0(self._raise_error)

    def close(self) -> None:
        """Wait until all lines were written, and end the thread. Raises the error of this rank that no other call has
        raised. Not collective, so that it can be called after an error."""
        self._jobs.join()
        self._raise_error()

    def _hand_over(self) -> None:
        if self._steps:
            self._jobs.submit(partial(self._metrics.add, self._steps))
            if self.epoch_metrics is not None:
                self._jobs.submit(partial(self.epoch_metrics.add_steps, self._steps, self._codes))
            self._steps, self._codes, self._num_samples = [], [], 0

    def _raise_error(self) -> None:
        if (error := self._jobs.pop_error()) is not None:
            raise error
