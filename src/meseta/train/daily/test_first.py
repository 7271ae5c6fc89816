"""Evaluation of the parent of a run on the new rows, before they are trained on."""

from __future__ import annotations

import time

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.pipeline.losses import Model
from meseta.system.waits import track_activity
from meseta.telemetry.continued import EpochMetricsRecord, GroupMetrics
from meseta.train.daily.epoch_metrics import EpochMetrics
from meseta.train.daily.new_ids import NewIds
from meseta.train.evaluate import LogitShift, gather_windows, predict
from meseta.train.metrics import MetricWindow, TaskWindows, task_metrics
from meseta.train.setup.build import make_reader


def evaluate_first(
    model: Model, reader: BatchReader, world: World, new_ids: NewIds, logit_shift: LogitShift = 0.0
) -> EpochMetricsRecord:
    """Return the metrics over all rows of the reader, in total and by group. Collective, equal on all ranks.

    The metrics in total are those of `evaluate` and `meseta predict` for the model's parent, bit for bit. New values of
    vocabularies are scored as the parent scores them, with row 0 of their table. The rows of new values may therefore
    be in the model already. The groups are exact up to `MAX_EXACT_SAMPLES` rows.

    Raises MesetaError if the rows have no labels, or under the conditions of `MetricWindow.compute`.
    """
    reader.dataset.check_has_labels()
    start_s = time.perf_counter()
    windows = TaskWindows(reader.dataset.labels, MetricWindow)
    groups = EpochMetrics(reader.dataset.labels, new_ids, world)
    with track_activity("testing the parent on the new rows"):
        for logits, batch in predict(model, reader, world, logit_shift, OutOfRangeIds(), new_ids.hide):
            columns = (batch.label, batch.weight, batch.group, batch.label_mask)
            label, weight, group, label_mask = (None if column is None else column.numpy() for column in columns)
            assert label is not None
            windows.add(logits, label, weight, group, label_mask=label_mask)
            groups.add_scores(logits, batch)
        merged = gather_windows(windows, world)
        record = groups.compute()
        total = task_metrics({task: merged[task].compute() for task in merged.tasks}, ("reliability",))
    seconds = time.perf_counter() - start_s
    return record.model_copy(update={"total": GroupMetrics.model_validate(total), "time_s": seconds})


def open_all_rows(config: RunConfig, dataset: Dataset, world: World) -> BatchReader:
    """Return a reader of all training rows in the order of the files, with times, for `evaluate_first`.

    It ignores `data.filter` and `data.negative_keep`, as `meseta predict` does. Raises MesetaError, and may be
    collective, as `make_reader`.
    """
    data = config.data.model_copy(update={"filter": None, "negative_keep": 1.0})
    all_rows = config.model_copy(update={"data": data})
    return make_reader(all_rows, dataset.with_times(), "train", world, in_order=True)
