"""Every row of a split once, over all ranks: metrics, or predictions in the order of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from meseta.comm import World
from meseta.config import MetricsConfig
from meseta.data.batch import Batch
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.new_batches import NewBatches
from meseta.data.read.tensors import pad_batch
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.machine.waits.activity import track_activity
from meseta.measure.step_threads import StepThreads
from meseta.models.base import select_score_input
from meseta.pipeline.model import Model
from meseta.spec import MesetaError, suggest
from meseta.train.metrics import Metrics, MetricWindow, Segment, TaskWindows, segment_metrics, task_metrics
from meseta.train.metrics.tasks import WindowT
from meseta.train.state import sum_out_of_range_ids

MIN_PADDED_ROWS = 64
"""Rows from which on the products of a model are computed alike for any number of them."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures over all rows of a split."""

    tasks: dict[str, Metrics]
    """By label, in the order of the dataset."""
    segments: dict[str, list[Segment]] = field(default_factory=dict)
    """Feature to figures by its values."""
    num_out_of_range: dict[str, int] = field(default_factory=dict)
    """Ids outside their table, by feature."""

    def to_dict(self, *, include_reliability: bool = True) -> dict[str, Any]:
        """Plain data for JSON: the figures of the first label, those of all under "tasks" where there are several,
        "segments" and "ids_outside" where there are any; the reliability curves may be left out."""
        segments = {feature: [one.to_dict() for one in found] for feature, found in self.segments.items()}
        return {
            **task_metrics(self.tasks, () if include_reliability else ("reliability",)),
            **({"segments": segments} if segments else {}),
            **({"ids_outside": self.num_out_of_range} if self.num_out_of_range else {}),
        }


def predict(
    model: Model,
    reader: BatchReader | NewBatches,
    world: World,
    logit_shift: float = 0.0,
    outside: OutOfRangeIds | None = None,
) -> Iterator[tuple[NDArray[Any], Batch]]:
    """This rank's slice of each global batch, in CPU memory, with its logits [B] or [B, T]; without any update,
    and with the model in evaluation mode: no dropout, running statistics.

    `logit_shift` is added to the logits, see meseta.data.read.selection.calibration_shift; `outside` counts ids outside
    their table, those of training are left as they were. A row's logit does not depend on the
    rows beside it: slices of a few rows are filled up, since products of few rows add in another order.
    """
    step_threads, outside = StepThreads(), outside or OutOfRangeIds()
    with torch.no_grad(), evaluation_mode(model), closing(reader.epoch()) as batches:
        for batch in batches:
            num_rows = batch.batch_size
            with step_threads:
                enough = pad_batch(batch, MIN_PADDED_ROWS) if 0 < num_rows < MIN_PADDED_ROWS else batch
                on_device = enough.to(world.device, non_blocking=True)
                flight = model.embeddings.start_input_dist(on_device.sparse, out_of_range_ids=outside)
                pooled = select_score_input(model, model.embeddings(model.embeddings.input_dist(flight)))
                logits = model.score(on_device.dense, pooled)
                scores = logits[:num_rows].cpu().numpy()
            yield (scores + scores.dtype.type(logit_shift) if logit_shift else scores), batch


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """All modules in evaluation mode; afterwards each as it was."""
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
    model: Model, reader: BatchReader, world: World, config: MetricsConfig | None = None, logit_shift: float = 0.0
) -> Evaluation:
    """Figures over all rows of the reader's split, the same on every rank and for any number of ranks; `logit_shift` is
    added to the logits.

    Samples count by their weights where the data have them, and groups are measured where they have those. Raises
    MesetaError for a segment that is no feature with one id per sample.
    """
    config = config or MetricsConfig()
    reader.dataset.check_has_labels()
    check_segments(reader.dataset, config.segments)
    windows, outside = TaskWindows(reader.dataset.labels, MetricWindow), OutOfRangeIds()
    keys: dict[str, list[NDArray[np.int64]]] = {feature: [] for feature in config.segments}
    with track_activity(f"evaluating the {reader.split} split"):
        for logits, batch in predict(model, reader, world, logit_shift, outside):
            known = _to_numpy(batch.label_mask)
            windows.add(logits, batch.label.numpy(), _to_numpy(batch.weight), _to_numpy(batch.group), label_mask=known)
            for feature, parts in keys.items():
                parts.append(batch.sparse[feature].values.numpy())
    together = gather_windows(windows, world)
    segments = {
        feature: segment_metrics(together, gather_rows(_concatenate(parts), world), config.max_segments)
        for feature, parts in keys.items()
    }
    metrics = {task: together[task].compute(config.ndcg_k) for task in together.tasks}
    counts = sum_out_of_range_ids(model.embeddings.features, outside.counts, world)
    return Evaluation(tasks=metrics, segments=segments, num_out_of_range=counts)


def check_segments(dataset: Dataset, segments: Sequence[str]) -> None:
    """Raises MesetaError for a segment that is no feature of the dataset with one id per sample."""
    features = {feature.name: feature for feature in dataset.sparse}
    for name in segments:
        if name not in features:
            raise MesetaError(f"metrics: the segment {name!r} is no sparse feature; {suggest(name, list(features))}")
        if features[name].multi_valued:
            raise MesetaError(
                f"metrics: a sample has several ids of {name!r}, so it makes no segments; take a feature with one"
            )


def gather_windows(windows: TaskWindows[WindowT], world: World) -> TaskWindows[WindowT]:
    """The samples of all ranks, in the order of ranks."""
    return windows.merge(world.all_gather_object(windows.get_state()))


def gather_rows(parts: NDArray[Any], world: World) -> NDArray[Any]:
    """The slices of all ranks, put together in the order of ranks."""
    return np.concatenate(world.all_gather_object(parts))


def _to_numpy(column: torch.Tensor | None) -> NDArray[Any] | None:
    return None if column is None else column.numpy()


def _concatenate(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])
