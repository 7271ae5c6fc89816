"""Metrics over all new rows, by UTC hour, and separately for samples with and without new ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.telemetry.continued import EpochMetricsRecord
from meseta.train.daily.binned_epoch import BinnedEpoch
from meseta.train.daily.new_ids import NewIds
from meseta.train.daily.sample_groups import compute_exact, sort_samples, to_codes, to_hours
from meseta.train.evaluate import gather_windows
from meseta.train.metrics import MetricWindow, TaskWindows
from meseta.train.running_metrics import StepPredictions, concatenate_steps

MAX_EXACT_SAMPLES = 1 << 22
"""Number of samples over all ranks up to which metrics are exact. They take 13 bytes per sample and label."""
BINNING_SAMPLES = 1 << 18
"""Number of samples that are binned together."""
_EXACT, _BINNED = "epoch_exact", "epoch_binned"


class EpochMetrics:
    """Metrics of predictions over one epoch, in bounded memory.

    Up to `MAX_EXACT_SAMPLES` samples, they are exact. From then on, the AUC is binned, with an error bound, and all
    other metrics remain exact. Results are equal for any number of ranks and after a resume.

    One thread at a time may use it, except that `codes` may run next to the other methods.
    """

    def __init__(
        self, tasks: Sequence[str], new_ids: NewIds, world: World, max_exact_samples: int = MAX_EXACT_SAMPLES
    ) -> None:
        """Create metrics of `tasks`, the labels of the dataset."""
        self._new_ids, self._world, self._max_exact_samples = new_ids, world, max_exact_samples
        self._tasks = tuple(tasks)
        # The group of a sample in a window is its code.
        self._windows = TaskWindows(tasks, MetricWindow)
        self._binned = BinnedEpoch(tasks)

    def codes(self, batch: Batch) -> NDArray[np.int64]:
        """Return the group codes [n] of the samples of a batch in host memory, without padding."""
        num_samples = batch.batch_size - batch.num_padding
        times = None if batch.time is None else batch.time[:num_samples].numpy()
        return to_codes(to_hours(times, num_samples), self._new_ids.of_batch(batch)[:num_samples])

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Add this rank's logits [B] or [B, T] of its slice of a global batch, which is in host memory."""
        self.add_steps([StepPredictions.start_copy(logits, batch)], [self.codes(batch)])

    def add_scores(self, scores: NDArray[Any], batch: Batch) -> None:
        """Add logits [B] or [B, T] in host memory, see `add`."""
        self.add(torch.from_numpy(scores), batch)

    def add_steps(self, steps: Sequence[StepPredictions], codes: Sequence[NDArray[np.int64]]) -> None:
        """Add the predictions of successive steps with the `codes` of their batches."""
        pairs = zip(steps, codes, strict=True)
        for _, group in groupby(pairs, lambda pair: (pair[0].weights is None, pair[0].label_mask is None)):
            some_steps, some_codes = zip(*group, strict=True)
            logits, labels, weights, label_mask = concatenate_steps(some_steps)
            self._windows.add(logits, labels, weights, np.concatenate(some_codes), label_mask=label_mask)
        num_samples = self._num_exact
        if num_samples > (BINNING_SAMPLES if self._binned.num_samples else self._max_exact_samples):
            self._bin()

    def compute(self) -> EpochMetricsRecord:
        """Return the metrics of all samples. Collective, equal on all ranks.

        Raises MesetaError, on all ranks, under the conditions of `MetricWindow.compute`.
        """
        if self._must_bin():
            self._bin()
            states = self._world.all_gather_object(self._binned.get_state())
            return self._world.broadcast_from_rank_0(lambda: BinnedEpoch.merge(self._tasks, states).compute())
        merged = gather_windows(self._windows, self._world).get_state()
        return self._world.broadcast_from_rank_0(lambda: compute_exact(_with_codes(merged)))

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint. Collective. Rank 0 has the samples of all ranks, and other ranks return
        nothing."""
        if self._must_bin():
            self._bin()
            states = self._world.all_gather_object(self._binned.get_state())
            columns = BinnedEpoch.merge(self._tasks, states).get_state() if self._world.rank == 0 else {}
            return {f"{_BINNED}.{name}": torch.from_numpy(column.copy()) for name, column in columns.items()}
        merged = gather_windows(self._windows, self._world).get_state()
        if self._world.rank != 0:
            return {}
        return {
            f"{_EXACT}.{task}.{name}": torch.from_numpy(column)
            for task, state in _with_codes(merged).items()
            for name, column in sort_samples(state).items()
        }

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of `get_tensors`, or start without samples if there is none. All ranks may call it, and
        rank 0 keeps the state."""
        self._windows.reset()
        self._binned = BinnedEpoch(self._tasks)
        if self._world.rank != 0:
            return
        exact: dict[str, dict[str, NDArray[Any]]] = {}
        binned: dict[str, NDArray[Any]] = {}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            task, _, name = rest.rpartition(".")
            if kind == _EXACT:
                exact.setdefault(task, {})[name] = tensor.numpy()
            elif kind == _BINNED:
                binned[rest] = tensor.numpy()
        if exact:
            self._windows.set_state(exact)
        self._binned.add_state(binned)

    @property
    def _num_exact(self) -> int:
        return self._windows[self._tasks[0]].num_samples

    def _must_bin(self) -> bool:
        counts = self._world.all_gather_object((self._num_exact, self._binned.num_samples))
        exact, binned = map(sum, zip(*counts, strict=True))
        return bool(binned) or exact > self._max_exact_samples

    def _bin(self) -> None:
        self._binned.add(_with_codes(self._windows.get_state()))
        self._windows.reset()


def _with_codes(state: Mapping[str, Mapping[str, NDArray[Any]]]) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the columns of windows by task. A window without samples has no column of groups."""
    return {task: {"groups": np.empty(0, np.int64), **columns} for task, columns in state.items()}
