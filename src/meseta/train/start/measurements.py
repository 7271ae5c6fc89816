"""Measurements of a run that starts from a parent on its new rows: before training, while training, and over days."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.statistics import read_row_bits, write_row_bits
from meseta.spec import MesetaError
from meseta.telemetry.continued import ContinuedSummary, EpochMetricsRecord
from meseta.telemetry.history import read_history, write_history
from meseta.telemetry.summary import RunSummary
from meseta.train.daily.chain import checksum_sources, find_trained_source, make_line, parent_history
from meseta.train.daily.drift import measure_drift
from meseta.train.daily.epoch_metrics import EpochMetrics
from meseta.train.daily.new_ids import NewIds
from meseta.train.daily.test_first import evaluate_first, open_all_rows
from meseta.train.evaluate import logit_shift
from meseta.train.setup.source import make_row_source
from meseta.train.start.parent import Parent
from meseta.train.start.start_record import load_record

if TYPE_CHECKING:
    from meseta.train.trainer import Trainer

CONTINUED_FILE, NEW_ROWS_FILE = "continued.json", "new_rows.parquet"
"""Files of a run folder: measurements before the first step, and which rows are new."""


def record_parent(trainer: Trainer, parent: Parent, masks: Mapping[str, NDArray[np.bool_]]) -> None:
    """Store what later starts need of the parent. Only for rank 0.

    Raises MesetaError if the rows were trained on before by a run of the chain, unless `start.again` is set.
    """
    run_dir, config = trainer.run_dir.path, trainer.config
    history = parent_history(parent.run.path) if parent.run is not None and parent.run.has_begun else ()
    sources = checksum_sources(trainer.dataset)
    former = find_trained_source(history, sources)
    if former is not None and not config.start.again:
        path, run = former
        raise MesetaError(
            f"source {path!r} has nothing new to train on: run {run!r} was trained on the same file; choose new rows, "
            "or train on them once more with --again"
        )
    write_row_bits(
        run_dir / NEW_ROWS_FILE, {name: np.packbits(mask, bitorder="little") for name, mask in masks.items()}
    )
    write_history(run_dir, history, make_line(run_dir.resolve().name, trainer.dataset, RunSummary(), sources=sources))
    summary = ContinuedSummary(parent=str(config.start_from), checkpoint=str(parent.checkpoint))
    trainer.run_dir.write_json(CONTINUED_FILE, summary.to_dict())


class NewRowMeasurements:
    """Measurements of one run. All ranks make the same calls."""

    def __init__(self, trainer: Trainer, before: Dataset | None = None) -> None:
        """Read what `record_parent` has stored. `before` are the rows of the parent, if the run starts now.

        Raises MesetaError, on all ranks, if a file is missing or invalid.
        """
        self._trainer, self._before = trainer, before
        world, path = trainer.world, trainer.run_dir.path
        dataset = trainer.dataset
        sizes = {feature.name: feature.num_embeddings for feature in dataset.sparse}
        masks = world.broadcast_from_rank_0(lambda: _read_masks(path, sizes))
        self._summary, self._history = world.broadcast_from_rank_0(
            lambda: (load_record(path / CONTINUED_FILE, ContinuedSummary), read_history(path))
        )
        self._new_ids = NewIds(dataset, masks)
        self.epoch_metrics = EpochMetrics(dataset.labels, self._new_ids, world)

    def measure_first(self) -> list[str]:
        """Evaluate the parent on the new rows, and measure their drift, if the run starts now. Return lines to print.
        Collective.

        Raises MesetaError, on all ranks, if almost all values of a feature are new, unless `start.allow_unseen` is set.
        """
        if self._before is None:
            return []
        trainer, config, world = self._trainer, self._trainer.config, self._trainer.world
        test_first: EpochMetricsRecord | None = None
        if config.train.test_first:
            reader = open_all_rows(config, trainer.dataset, world)
            with trainer.average.applied():
                test_first = evaluate_first(trainer.model, reader, world, self._new_ids, logit_shift(config))
        retired = {feature.name: feature.num_retired for feature in trainer.dataset.sparse}
        former = self._history[-2].drift if len(self._history) > 1 else None
        drift, unseen = measure_drift(trainer.dataset, self._before, self._new_ids, world, retired, former)
        if not config.start.allow_unseen:
            unseen.check("train")
        self._summary = self._summary.model_copy(update={"test_first": test_first, "drift": drift})
        world.run_on_rank_0(lambda: trainer.run_dir.write_json(CONTINUED_FILE, self._summary.to_dict()))
        return [f"note: {text}" for text in drift.large]

    def finish(self) -> ContinuedSummary:
        """Return all measurements at the end of the run. Collective."""
        progressive = self.epoch_metrics.compute()
        self._summary = self._summary.model_copy(update={"progressive": progressive})
        return self._summary

    def write_history(self, summary: RunSummary) -> None:
        """Write history.jsonl with the line of the finished run. Only for rank 0."""
        trainer, sources = self._trainer, self._history[-1].sources
        line = make_line(
            trainer.run_dir.path.resolve().name,
            trainer.dataset,
            summary,
            data=str(make_row_source(trainer.config.data)),
            sources=sources,
            finished_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        write_history(trainer.run_dir.path, self._history[:-1], line)


def _read_masks(run_dir: Path, num_rows: Mapping[str, int]) -> dict[str, NDArray[np.bool_]]:
    bits = read_row_bits(run_dir / NEW_ROWS_FILE, num_rows)
    return {
        name: np.unpackbits(one, count=num_rows[name], bitorder="little").view(np.bool_) for name, one in bits.items()
    }
