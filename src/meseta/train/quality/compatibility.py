"""Check, before anything is trained, that the configs of a suite fit its data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from meseta.comm import World
from meseta.config import RunConfig, load_config
from meseta.spec import MesetaError
from meseta.train.dataset_checks import open_dataset
from meseta.train.evaluate import check_segments
from meseta.train.evaluation_tracker import check_early_stopping
from meseta.train.quality.study import SuiteRun
from meseta.train.setup.build import make_reader, plan_model, task_weights

PROBE_ROWS = 1000
"""Number of rows of a world that is made only to find its columns."""


def check_configs_fit(runs: Sequence[SuiteRun], data: Path) -> None:
    """Raise MesetaError for the first config that does not fit `data`, with the names of config and dataset.

    Nothing is trained, and no memory is allocated for tables.
    """
    world = World.single("cpu")
    for run in runs:
        config = load_config(run.config, [*run.overrides, f"data.dir={json.dumps(str(data))}"])
        try:
            _check_config(config, world)
        except MesetaError as error:
            raise MesetaError(f"quality: config {run.name!r} does not fit {run.eval_dataset.name!r}: {error}") from None


def _check_config(config: RunConfig, world: World) -> None:
    dataset = open_dataset(config, world)
    dataset.check_has_labels()
    if len(dataset.labels) > 1:
        raise MesetaError(
            f"a suite compares a single label, but the data has {', '.join(map(repr, dataset.labels))}; set "
            "data.labels to one of them"
        )
    plan_model(config, dataset, world)
    task_weights(config, dataset)
    check_segments(dataset, config.metrics.segments)
    check_early_stopping(config.train.early_stopping, dataset)
    make_reader(config, dataset, "train", world)
