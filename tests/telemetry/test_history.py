"""The history of a chain of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meseta.spec import MesetaError
from meseta.telemetry.continued import HistoryLine
from meseta.telemetry.history import HISTORY_FILE, read_history, write_history

METRICS = {"num_samples": 10, "ne": 0.9, "auc": None}
EPOCH = {"total": METRICS, "with_new_ids": METRICS, "by_hour": {"2026-11-27T14": METRICS}}
DRIFT = {
    "num_rows": 10,
    "dense": {"price": {"mean_shift": 0.5, "std_ratio": 1.0, "fill_share": 0.25}},
    "labels": {"label": {"rate": 0.1, "rate_before": 0.2}},
    "large": ["the mean has shifted"],
}


def line(run: str) -> HistoryLine:
    sources = [{"path": "day.csv", "num_rows": 10, "sha256": "0" * 64}]
    document = {"run": run, "sources": sources, "seconds": 1.5, "progressive": EPOCH, "drift": DRIFT, "later": 1}
    return HistoryLine.model_validate(document)


def test_lines_are_kept_in_order_with_their_unknown_keys(tmp_path: Path) -> None:
    assert read_history(tmp_path) == ()
    first, second = tmp_path / "1", tmp_path / "2"
    for folder, name in ((first, "1"), (second, "2")):
        folder.mkdir()
        write_history(folder, read_history(first), line(name))
    assert read_history(second) == (line("1"), line("2"))
    documents = [json.loads(text) for text in (second / HISTORY_FILE).read_text().splitlines()]
    assert [document["run"] for document in documents] == ["1", "2"]
    assert documents[0]["drift"] == DRIFT
    assert documents[0]["later"] == 1
    write_history(second, read_history(first), line("2"))  # Again, after a kill.
    assert len(read_history(second)) == 2


GOOD = line("1").to_dict()


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ('{"run": "1"', "it is not JSON"),
        ("[]", "Input should be a valid dictionary"),
        ({**GOOD, "run": None}, "key 'run': Input should be a valid string"),
        ({**GOOD, "num_rows": -1}, "key 'num_rows': Input should be greater than or equal to 0"),
        ({**GOOD, "sources": [{"path": "a", "sha256": "xyz"}]}, "key 'sources.0.sha256': String should match pattern"),
        ({**GOOD, "drift": {"num_rows": "many"}}, "key 'drift.num_rows': Input should be a valid integer"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, document: Any, problem: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    (tmp_path / HISTORY_FILE).write_text(f"{json.dumps(GOOD)}\n{text}\n")
    with pytest.raises(MesetaError, match="restore the file from a backup, or remove it") as caught:
        read_history(tmp_path)
    assert f"history {str(tmp_path / HISTORY_FILE)!r}, line 2: {problem}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).mkdir()
    with pytest.raises(MesetaError, match="cannot be read"):
        read_history(tmp_path)
