"""The last lines of `make train`."""

import json
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT


def show(run: Path, summary: dict) -> list[str]:
    (run / "summary.json").write_text(json.dumps(summary))
    command = [sys.executable, str(ROOT / "tools" / "show_run.py"), str(run)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


SUMMARY = {
    "test": {"auc": 0.80126, "ne": 0.75},
    "teacher": {"auc": 0.81, "ne": 0.74},
    "num_samples": 2_000_000,
    "train_s": 50.4,
    "samples_per_s": 39_682.5,
}


def test_the_model_stands_beside_the_teacher(tmp_path: Path) -> None:
    lines = [line.split() for line in show(tmp_path, SUMMARY)]
    assert ["this", "run", "0.8013", "0.7500"] in lines
    assert next(line for line in lines if line[0] == "teacher")[:3] == ["teacher", "0.8100", "0.7400"]
    assert "2,000,000 samples in 50 s: 39,682 samples/s" in show(tmp_path, SUMMARY)
    assert show(tmp_path, SUMMARY)[-1] == f"report: {tmp_path / 'report.html'}"


def test_real_data_has_no_teacher(tmp_path: Path) -> None:
    assert not [line for line in show(tmp_path, {**SUMMARY, "teacher": None}) if line.startswith("teacher")]
