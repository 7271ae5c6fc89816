"""Configs that ask for what the data lack, and a score that is of other rows than the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meseta.comm import World
from meseta.config import load_config
from meseta.data.dataset.dataset import Dataset
from meseta.report.quality.suite_result import EvalDataset
from meseta.spec import MesetaError
from meseta.train.metrics import auc, normalized_entropy
from meseta.train.quality.compatibility import check_configs_fit
from meseta.train.quality.scoring import score_run
from meseta.train.quality.study import SuiteRun
from meseta.train.quality.worlds import TRUTH_FILE
from meseta.train.sweep import Trial
from meseta.train.trainer import Trainer
from small_run import settings, tiny_with_valid, write_config


def run_of(folder: Path, data: Path, truth: Path | None = None, **changes: Any) -> SuiteRun:
    """Of a config whose settings are given as `settings` takes them."""
    config = write_config(folder / "c.yaml", settings(data, folder / "run", train__max_steps=3, **changes))
    trial = Trial(1, {}, folder / "run")
    return SuiteRun(
        eval_dataset=EvalDataset(name="tiny"), name="one", config=config, trial=trial, seed=1, data=data, truth=truth,
        reads_test=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__labels": ["clicked"]}, "'clicked'"),
        ({"metrics__segments": ["town"]}, "'town'"),
        ({"data__filter": "height > 3"}, "'height'"),
        ({"train__task_weights": {"bought": 2.0}}, "'bought'"),
        ({"embedding__tables": {"town": {"init": {"scale": 1.0}}}}, "'town'"),
    ],
)
def test_what_the_data_lack_is_told_with_the_config(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    data = tiny_with_valid(tiny)
    check_configs_fit([run_of(tmp_path, data)], data)
    with pytest.raises(MesetaError, match=r"^quality: config 'one' does not fit 'tiny': ") as caught:
        check_configs_fit([run_of(tmp_path, data, **changes)], data)
    assert words in str(caught.value)


def test_a_score_is_that_of_predictions_of_test(tiny: Path, tmp_path: Path) -> None:
    data = tiny_with_valid(tiny)
    run = run_of(tmp_path, data)
    Trainer(load_config(run.config, run.overrides), World.current(), with_test=False).run()
    score_run(run)
    with np.load(run.logits_file) as kept:
        logits, labels = kept["logits"], kept["labels"]
    found = run.score()
    assert found is not None and len(labels) == Dataset.load(data).splits["test"].num_rows
    assert (found.auc, found.ne, found.regret) == (auc(logits, labels), normalized_entropy(logits, labels), None)
    assert found.num_table_parameters == sum(f.num_embeddings for f in Dataset.load(data).sparse) * 4
    assert not (run.trial.run_dir / "checkpoints").exists() and found.flops_per_sample > 0


def test_truth_of_other_rows_is_refused_and_leaves_no_score(tiny: Path, tmp_path: Path) -> None:
    data, truth = tiny_with_valid(tiny), tmp_path / "truth"
    truth.mkdir()
    run = run_of(tmp_path, data, truth)
    Trainer(load_config(run.config, run.overrides), World.current(), with_test=False).run()
    num_rows = Dataset.load(data).splits["test"].num_rows
    np.savez(truth / TRUTH_FILE, labels=np.full(num_rows, 1), probabilities=np.full(num_rows, 0.5))
    with pytest.raises(MesetaError, match="differ from those of the true probabilities; delete"):
        score_run(run)
    assert not run.score_file.exists()
    (truth / TRUTH_FILE).unlink()
    with pytest.raises(MesetaError, match=r"cannot be read .*; delete"):
        score_run(run)
