"""Selection of the learning rate of tables by short trial runs, before the run itself."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

from meseta.comm import World
from meseta.config import RunConfig, validate_document
from meseta.data.dataset.dataset import Dataset
from meseta.system.files import parse_json, read_if_exists
from meseta.telemetry.metrics_file import EvalLine
from meseta.train.run_dir import TRIALS_FOLDER, RunDir
from meseta.train.trainer import Trainer

# The first update of a row has about the size of the rate. Small rates suit ids with a weak effect on the label, large
# rates suit rare ids with a strong effect.
CANDIDATE_RATES = (0.005, 0.015, 0.05, 0.15)
"""Learning rates of row-wise Adagrad to try."""
MAX_TRIAL_ROWS = 1_000_000
"""Maximum number of training samples of a trial. On a smaller dataset, a trial ends when the validation metric fails to
improve once."""

# File in the folder of a finished trial with the evaluation that counts.
_RESULT_FILE = "evaluation.json"


def choose_table_rate(config: RunConfig, dataset: Dataset, world: World) -> RunConfig:
    """Return `config` with the learning rate of tables that has the best validation AUC in trials. Collective.

    If the run in run_dir has begun, its rate is kept. Finished trials are not repeated. If no trial has an AUC, the
    rate of `config` is kept.
    """
    previous_rate = world.broadcast_from_rank_0(lambda: _load_table_rate(config.run_dir))
    if previous_rate is not None:
        return _with_rate(config, previous_rate)
    auc_by_rate = {rate: _run_trial(config, dataset, rate, world) for rate in CANDIDATE_RATES}
    tried = {rate: auc for rate, auc in auc_by_rate.items() if auc is not None}
    best = max(tried, key=lambda rate: tried[rate]) if tried else config.embedding.optimizer.lr
    if world.rank == 0:
        formatted = ", ".join(f"{rate:g}: {auc:.4f}" for rate, auc in tried.items()) or "undefined"
        print(f"validation AUC by learning rate of the tables: {formatted}; embedding.optimizer.lr={best:g}")
    world.run_on_rank_0(lambda: shutil.rmtree(config.run_dir / TRIALS_FOLDER, ignore_errors=True))
    return _with_rate(config, best)


def _load_table_rate(run_dir: Path) -> float | None:
    # A resumed run keeps the rate that it was started with.
    run = RunDir(run_dir)
    return run.load_config().embedding.optimizer.lr if run.has_begun else None


def _run_trial(config: RunConfig, dataset: Dataset, rate: float, world: World) -> float | None:
    """Return the validation AUC of a trial, of its best evaluation if `train.finish` is 'best'. No checkpoints are
    saved."""
    trial = RunDir(config.run_dir / TRIALS_FOLDER / f"rate-{rate:g}")
    evaluation = world.broadcast_from_rank_0(lambda: _load_result(trial))
    if evaluation is None:
        if world.rank == 0:
            print(f"trial: embedding.optimizer.lr={rate:g}", file=sys.stderr, flush=True)
        trainer = Trainer(_trial_config(config, dataset, rate, trial.path), world, with_test=False)
        evaluation = trainer.run_trial(best=config.train.finish == "best")
        line = evaluation
        world.run_on_rank_0(lambda: trial.write_json(_RESULT_FILE, line.to_dict()))
    return evaluation.auc


def _load_result(trial: RunDir) -> EvalLine | None:
    content = read_if_exists(trial.path / _RESULT_FILE)
    try:
        return None if content is None else EvalLine.model_validate(parse_json(content))
    except ValueError:
        return None


def _trial_config(config: RunConfig, dataset: Dataset, rate: float, run_dir: Path) -> RunConfig:
    epochs = MAX_TRIAL_ROWS / max(dataset.splits["train"].num_rows, 1)
    document = _with_rate(config, rate).model_dump(mode="json")
    # All trials need the same memory, so only the first one checks it.
    document |= {
        "run_dir": str(run_dir),
        "checkpoint": None,
        "check_memory": config.check_memory and rate == CANDIDATE_RATES[0],
    }
    document["train"] |= {"finish": "last", "epochs": min(config.train.epochs, math.ceil(epochs)), "tensorboard": False}
    if config.train.early_stopping.patience is not None:
        document["train"]["early_stopping"]["patience"] = 1
    if epochs < 1:
        document["train"]["max_steps"] = math.ceil(MAX_TRIAL_ROWS / config.train.batch_size)
    return validate_document(document)


def _with_rate(config: RunConfig, rate: float) -> RunConfig:
    optimizer = config.embedding.optimizer.model_copy(update={"lr": rate})
    return config.model_copy(update={"embedding": config.embedding.model_copy(update={"optimizer": optimizer})})
