"""Progress lines of training."""

import pytest

from meseta.telemetry.metrics_file import EvalLine
from meseta.train.progress import TrainProgress


def test_an_evaluation_of_no_samples_has_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    line = EvalLine(step=1, num_samples=0, auc=None, logloss=None)
    progress = TrainProgress(1, first_step=0, visible=True)
    progress.log(line)
    progress.log(EvalLine(step=1, num_samples=1200, logloss=0.5, auc=0.75))
    assert capsys.readouterr().err.splitlines() == [
        "test at step 1: no metrics, 0 samples",
        "test at step 1: logloss 0.5000  AUC 0.7500, 1,200 samples",
    ]
