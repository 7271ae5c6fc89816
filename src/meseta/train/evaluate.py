"""Evaluation and prediction over a split, in which every row is read once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from meseta.comm import World
from meseta.config import MetricsConfig, RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch import Batch
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.new_batches import NewBatches
from meseta.data.read.selection import calibration_shift
from meseta.data.read.tensors import pad_batch
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.measure.threads import StepThreads
from meseta.models.layers import select_score_input
from meseta.pipeline.losses import Model
from meseta.spec import MesetaError, suggest
from meseta.system.waits import track_activity
from meseta.train.metrics import Metrics, MetricWindow, Segment, TaskWindows, segment_metrics, task_metrics
from meseta.train.metrics.tasks import WindowT
from meseta.train.state import sum_out_of_range_ids

MIN_PADDED_ROWS = 64
"""Smallest number of rows for which the logit of a row does not depend on the number of rows of its batch."""
LogitShift = float | Callable[[NDArray[Any]], NDArray[Any]]
"""Value added to logits, or a function that returns the corrected logits of the next batch."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics over all rows of a split."""

    tasks: dict[str, Metrics]
    """Metrics by label, in the order of the dataset."""
    segments: dict[str, list[Segment]] = field(default_factory=dict)
    """Metrics by feature, for segments of its values."""
    num_out_of_range: dict[str, int] = field(default_factory=dict)
    """Number of out-of-range ids by feature."""

    def to_dict(self, *, include_reliability: bool = True) -> dict[str, Any]:
        """Convert to plain data for JSON, optionally without reliability curves.

        The result has the metrics of the first label. "tasks" has those of each of several labels. "segments" and
        "ids_outside" are omitted if they are empty.
        """
        segments = {feature: [one.to_dict() for one in segment_list] for feature, segment_list in self.segments.items()}
        return {
            **task_metrics(self.tasks, () if include_reliability else ("reliability",)),
            **({"segments": segments} if segments else {}),
            **({"ids_outside": self.num_out_of_range} if self.num_out_of_range else {}),
        }


def predict(
    model: Model,
    reader: BatchReader | NewBatches,
    world: World,
    logit_shift: LogitShift = 0.0,
    outside: OutOfRangeIds | None = None,
    encode: Callable[[Batch], Batch] | None = None,
) -> Iterator[tuple[NDArray[Any], Batch]]:
    """Yield (logits [B] or [B, T], batch) for this rank's slice of each global batch, in CPU memory.

    The model is in evaluation mode and is not updated. The logit of a row does not depend on the other rows of its
    batch.

    Args:
        model: Trained model.
        reader: Reader of the split.
        world: Ranks of the run.
        logit_shift: Correction of the logits, see `TrainedModel.correction`.
        outside: Counts out-of-range ids. The counts of training are unchanged.
        encode: Returns the batch to score in place of a batch of the reader.
    """
    step_threads, outside = StepThreads(), outside or OutOfRangeIds()
    with torch.no_grad(), evaluation_mode(model), closing(reader.epoch()) as batches:
        for batch in batches:
            with step_threads:
                scores = score_batch(model, batch if encode is None else encode(batch), world, outside)
            if callable(logit_shift):
                yield logit_shift(scores), batch
            else:
                yield (scores + scores.dtype.type(logit_shift) if logit_shift else scores), batch


def score_batch(model: Model, batch: Batch, world: World, outside: OutOfRangeIds) -> NDArray[Any]:
    """Return the logits [B] or [B, T] of this rank's slice of a global batch, in CPU memory. Collective.

    The caller sets the evaluation mode and disables gradients. `outside` counts out-of-range ids.
    """
    num_rows = batch.batch_size
    # Matrix products of few rows add in another order, so pad small slices.
    padded = pad_batch(batch, MIN_PADDED_ROWS) if 0 < num_rows < MIN_PADDED_ROWS else batch
    on_device = padded.to(world.device, non_blocking=True)
    context = model.embeddings.start_input_dist(on_device.sparse, out_of_range_ids=outside)
    pooled = select_score_input(model, model.embeddings(model.embeddings.input_dist(context)))
    logits: torch.Tensor = model.score(on_device.dense, pooled)
    scores: NDArray[Any] = logits[:num_rows].cpu().numpy()
    return scores


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """Context manager that puts all modules in evaluation mode, and restores the mode of each afterwards."""
    modules = list(cast(nn.Module, model).modules())
    was_training = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, was_training, strict=True):
            module.training = training


def evaluate(
    model: Model,
    reader: BatchReader | NewBatches,
    world: World,
    config: MetricsConfig | None = None,
    logit_shift: LogitShift = 0.0,
) -> Evaluation:
    """Return the metrics over all rows of the reader. They are identical on all ranks and for any number of
    ranks.

    Samples are weighted if the data has weights, and grouped if it has groups. `logit_shift` corrects the logits.
    Raises MesetaError if a segment is not a single-valued feature, or the rows have no labels.
    """
    config = config or MetricsConfig()
    if isinstance(reader, BatchReader):
        reader.dataset.check_has_labels()
    elif not reader.dataset.has_labels:
        raise MesetaError("new rows: they have no labels, so they cannot be evaluated; use `meseta predict`")
    check_segments(reader.dataset, config.segments)
    windows, outside = TaskWindows(reader.dataset.labels, MetricWindow), OutOfRangeIds()
    # A rank may have no batches.
    keys = {feature: [np.empty(0, np.int64)] for feature in config.segments}
    with track_activity(
        f"evaluating the {reader.split} split" if isinstance(reader, BatchReader) else "evaluating new rows"
    ):
        for logits, batch in predict(model, reader, world, logit_shift, outside):
            label_mask = _to_numpy(batch.label_mask)
            windows.add(
                logits, batch.label.numpy(), _to_numpy(batch.weight), _to_numpy(batch.group), label_mask=label_mask
            )
            for feature, parts in keys.items():
                parts.append(batch.sparse[feature].values.numpy())
    merged = gather_windows(windows, world)
    segments = {
        feature: segment_metrics(merged, gather_rows(np.concatenate(parts), world), config.max_segments)
        for feature, parts in keys.items()
    }
    metrics = {task: merged[task].compute(config.ndcg_k) for task in merged.tasks}
    counts = sum_out_of_range_ids(model.embeddings.features, outside.counts, world)
    return Evaluation(tasks=metrics, segments=segments, num_out_of_range=counts)


def logit_shift(config: RunConfig) -> float:
    """Return the value to add to the logits of a run, which corrects the share of negatives that training dropped."""
    return calibration_shift(config.data.negative_keep)


def check_segments(dataset: Dataset, segments: Sequence[str]) -> None:
    """Raise MesetaError if a segment is not a single-valued sparse feature of the dataset."""
    features = {feature.name: feature for feature in dataset.sparse}
    for name in segments:
        if name not in features:
            raise MesetaError(f"metrics: segment {name!r} is not a sparse feature; {suggest(name, list(features))}")
        if features[name].multi_valued:
            raise MesetaError(
                f"metrics: cannot segment by {name!r}: it is multi-valued; choose a single-valued feature"
            )


def gather_windows(windows: TaskWindows[WindowT], world: World) -> TaskWindows[WindowT]:
    """Gather the samples of all ranks, in the order of ranks."""
    return windows.merge(world.all_gather_object(windows.get_state()))


def gather_rows(parts: NDArray[Any], world: World) -> NDArray[Any]:
    """Gather and concatenate the slices of all ranks, in the order of ranks."""
    return np.concatenate(world.all_gather_object(parts))


def _to_numpy(column: torch.Tensor | None) -> NDArray[Any] | None:
    return None if column is None else column.numpy()
