"""Lines of a history from the files of runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from meseta.data.dataset.dataset import Dataset
from meseta.telemetry.continued import ContinuedSummary, HistoryLine, SourceRecord
from meseta.telemetry.history import read_history, write_history
from meseta.telemetry.summary import RunSummary
from meseta.train.daily.chain import checksum_sources, find_trained_source, make_line, parent_history
from train.daily.test_new_rows_report import DRIFT, epoch
from train.test_report import make_run


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return make_run(tmp_path / "day1")


def test_a_parent_without_history_has_a_line_from_its_summary(parent: Path) -> None:
    [line] = parent_history(parent)
    assert (line.run, line.num_rows, line.num_steps, line.seconds) == ("day1", 102_400, 100, 151.2)
    assert line.evaluation is not None
    assert (line.evaluation.auc, line.evaluation.ne) == (0.8123, 0.8456)
    assert line.progressive is None
    assert "reliability" not in line.evaluation.to_dict()


def test_a_parent_that_was_interrupted_has_a_line(parent: Path) -> None:
    (parent / "summary.json").unlink()
    [line] = parent_history(parent)
    assert (line.run, line.num_rows, line.seconds, line.evaluation) == ("day1", 102_400, None, None)


def test_a_chain_outlives_its_older_runs(parent: Path, tmp_path: Path) -> None:
    continued = ContinuedSummary.model_validate(
        {
            "parent": str(parent),
            "test_first": epoch(0.8, ["2026-11-27T14"]),
            "progressive": epoch(0.7, []),
            "drift": DRIFT,
        }
    )
    summary = RunSummary(num_steps=5, train_s=2.5, continued=continued)
    line = make_line("day2", Dataset.load(parent), summary, data="data/2", finished_at="2026-11-28T00:00:00Z")
    (tmp_path / "day2").mkdir()
    write_history(tmp_path / "day2", parent_history(parent), line)
    before = parent_history(parent)
    for path in parent.iterdir():
        path.unlink()
    assert parent_history(tmp_path / "day2") == read_history(tmp_path / "day2") == (*before, line)
    stored = json.loads((tmp_path / "day2/history.jsonl").read_text().splitlines()[1])
    assert stored["drift"] == DRIFT
    assert stored["test_first"] == epoch(0.8, ["2026-11-27T14"])
    assert (stored["data"], stored["num_steps"], stored["seconds"]) == ("data/2", 5, 2.5)


def test_checksums_name_files_that_were_trained_on(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,x\n1,2\n")
    sources = [{"path": str(tmp_path / "a.csv"), "split": "train", "num_rows": 1}]
    sources.append({"path": "s3://bucket/b.csv", "split": "train", "num_rows": 2})
    document = json.loads((parent / "dataset.json").read_text()) | {"sources": sources}
    made = checksum_sources(Dataset.from_dict(document))
    digest = hashlib.sha256(b"label,x\n1,2\n").hexdigest()
    assert [(one.sha256, one.num_rows) for one in made] == [(digest, 1), (None, 2)]
    history = [HistoryLine(run="1", sources=(SourceRecord(path="old.csv", sha256=digest),)), HistoryLine(run="2")]
    assert find_trained_source(history, made) == (str(tmp_path / "a.csv"), "1")
    assert find_trained_source(history, made[1:]) is None
    assert find_trained_source([], made) is None
