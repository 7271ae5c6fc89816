"""Load of a run on the planner, computed from its config and dataset before training."""

from __future__ import annotations

from meseta.comm import World
from meseta.config import RunConfig
from meseta.spec import Workload
from meseta.train.dataset_checks import open_dataset
from meseta.train.evaluate import check_segments
from meseta.train.evaluation_tracker import check_early_stopping
from meseta.train.setup.build import make_reader, plan_model, task_weights


def run_workload(config: RunConfig) -> Workload:
    """Return the load of one training step of a run on one rank.

    No memory is allocated for tables. The result suits `meseta.make_plan`. Raises MesetaError if the config does not
    fit its dataset, or if the run needs more memory than there is.
    """
    world = World.single("cpu")
    dataset = open_dataset(config, world)
    dataset.check_has_labels()
    planner, _ = plan_model(config, dataset, world)
    task_weights(config, dataset)
    check_segments(dataset, config.metrics.segments)
    check_early_stopping(config.train.early_stopping, dataset)
    make_reader(config, dataset, "train", world)
    return planner.workload
