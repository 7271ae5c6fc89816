"""Configs that do not fit their data, and scores on the test split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meseta.comm import World
from meseta.config import load_config
from meseta.data import Dataset
from meseta.spec import MesetaError
from meseta.train.metrics import auc, normalized_entropy
from meseta.train.trainer import Trainer
from small_run import settings, tiny_with_valid, write_config
from tools.quality.comparison import EvalDataset
from tools.quality.scoring import check_configs_fit, score_run
from tools.quality.study import SuiteRun
from tools.quality.worlds import TRUTH_FILE


def make_run(folder: Path, data: Path, truth: Path | None = None, **changes: Any) -> SuiteRun:
    """Return a run of a config with `changes`, as in `small_run.settings`."""
    config = write_config(folder / "c.yaml", settings(data, folder / "run", train__max_steps=3, **changes))
    return SuiteRun(
        eval_dataset=EvalDataset(name="tiny"), name="one", config=config, number=1, settings={},
        run_dir=folder / "run", seed=1, data=data, truth=truth, reads_test=True,
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
def test_configs_that_do_not_fit_the_data_are_rejected(
    tiny: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    data = tiny_with_valid(tiny)
    check_configs_fit([make_run(tmp_path, data)], data)
    with pytest.raises(MesetaError, match=r"^quality: config 'one' does not fit 'tiny': ") as caught:
        check_configs_fit([make_run(tmp_path, data, **changes)], data)
    assert words in str(caught.value)


def test_score_is_computed_on_the_test_split(tiny: Path, tmp_path: Path) -> None:
    data = tiny_with_valid(tiny)
    run = make_run(tmp_path, data)
    Trainer(load_config(run.config, run.overrides), World.current(), with_test=False).run()
    score_run(run)
    with np.load(run.logits_file) as saved:
        logits, labels = saved["logits"], saved["labels"]
    score = run.score()
    assert score is not None and len(labels) == Dataset.load(data).splits["test"].num_rows
    assert (score.auc, score.ne, score.regret) == (auc(logits, labels), normalized_entropy(logits, labels), None)
    assert score.num_table_parameters == sum(f.num_embeddings for f in Dataset.load(data).sparse) * 4
    assert not (run.run_dir / "checkpoints").exists() and score.flops_per_sample > 0


def test_true_probabilities_of_other_rows_are_rejected(tiny: Path, tmp_path: Path) -> None:
    data, truth = tiny_with_valid(tiny), tmp_path / "truth"
    truth.mkdir()
    run = make_run(tmp_path, data, truth)
    Trainer(load_config(run.config, run.overrides), World.current(), with_test=False).run()
    num_rows = Dataset.load(data).splits["test"].num_rows
    np.savez(truth / TRUTH_FILE, labels=np.full(num_rows, 1), probabilities=np.full(num_rows, 0.5))
    with pytest.raises(MesetaError, match="differ from those of the true probabilities; delete"):
        score_run(run)
    assert not run.score_file.exists()
    (truth / TRUTH_FILE).unlink()
    with pytest.raises(MesetaError, match=r"cannot be read .*; delete"):
        score_run(run)
