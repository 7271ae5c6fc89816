"""A rate found by trial: shorter runs, judged on the valid split, before a run that leaves it open."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

from meseta.comm import World
from meseta.config import RunConfig, check_document
from meseta.data.dataset import Dataset
from meseta.train.run_dir import TRIALS, RunDir
from meseta.train.splits import VALID
from meseta.train.trainer import Trainer

RATES = (0.005, 0.015, 0.05, 0.15)
"""Of row-wise Adagrad, whose first step on a row is about as long as the rate: small for ids that say little, large for
ids that come a few times and say much."""
TRIAL_ROWS = 1_000_000
"""Samples of a trial, at most: of a small log, until its valid figure gains nothing once; of a large one, a part."""


def settle_table_rate(config: RunConfig, dataset: Dataset, world: World) -> RunConfig:
    """`config` with the rate of the tables that the run in run_dir was begun with, else with the one of RATES that is
    the best in trials, by the AUC of the valid split. Collective.

    Trials that were cut off go on where they were. Where no trial has an AUC, the rate stays.
    """
    begun = world.from_first(lambda: _rate_of_run(config.run_dir))
    if begun is not None:
        return _with_rate(config, begun)
    figures = {rate: _try(config, dataset, rate, world) for rate in RATES}
    tried = {rate: auc for rate, auc in figures.items() if auc is not None}
    best = max(tried, key=lambda rate: tried[rate]) if tried else config.embedding.optimizer.lr
    if world.rank == 0:
        told = ", ".join(f"{rate:g}: {auc:.4f}" for rate, auc in tried.items()) or "undefined"
        print(f"rates of the tables by the valid AUC of a trial: {told}; embedding.optimizer.lr={best:g}")
    world.on_first(lambda: shutil.rmtree(config.run_dir / TRIALS, ignore_errors=True))
    return _with_rate(config, best)


def _rate_of_run(run_dir: Path) -> float | None:
    """That of a run that has begun; None where there is none."""
    run = RunDir(run_dir)
    return run.load_config().embedding.optimizer.lr if run.has_begun else None


def _try(config: RunConfig, dataset: Dataset, rate: float, world: World) -> float | None:
    """The valid AUC of a trial at a rate: of its best weights, where the config ends with those."""
    if world.rank == 0:
        print(f"trial: embedding.optimizer.lr={rate:g}", file=sys.stderr, flush=True)
    epochs = TRIAL_ROWS / max(dataset.splits["train"].num_rows, 1)
    document = _with_rate(config, rate).model_dump(mode="json")
    document |= {"run_dir": str(config.run_dir / TRIALS / f"rate-{rate:g}"), "checkpoint": None}
    document["train"] |= {"epochs": min(config.train.epochs, math.ceil(epochs)), "tensorboard": False}
    if config.train.early_stopping.patience is not None:
        document["train"]["early_stopping"]["patience"] = 1
    if epochs < 1:
        document["train"]["max_steps"] = math.ceil(TRIAL_ROWS / config.train.batch_size)
    auc = Trainer(check_document(document), world, with_test=False).run()[VALID]["auc"]
    return None if auc is None else float(auc)


def _with_rate(config: RunConfig, rate: float) -> RunConfig:
    optimizer = config.embedding.optimizer.model_copy(update={"lr": rate})
    return config.model_copy(update={"embedding": config.embedding.model_copy(update={"optimizer": optimizer})})
