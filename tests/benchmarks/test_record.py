"""The history of measurements in benchmarks/results.csv."""

import csv
from pathlib import Path

import pytest
from record import HISTORY_COLUMNS, ROOT, PeerComparison, append_comparisons


def comparison(value: float, peer_value: float, unit: str) -> PeerComparison:
    return PeerComparison(
        benchmark="ops", case="c", metric="m", value=value, unit=unit, peer="other", peer_value=peer_value,
        versions={"torch": "9.9", "numpy": "8"},
    )  # fmt: skip


@pytest.mark.parametrize(("unit", "ratio"), [("lookups/s", 2.0), ("s", 0.5), ("ms", 0.5), ("MB", 0.5)])
def test_a_ratio_above_one_is_better(unit: str, ratio: float) -> None:
    assert comparison(10.0, 5.0, unit).ratio == ratio


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    append_comparisons(path, [comparison(1.0, 2.0, "s")])
    append_comparisons(path, [comparison(3.0, 2.0, "s"), comparison(4.0, 2.0, "s")])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == HISTORY_COLUMNS and [row["value"] for row in rows] == ["1", "3", "4"]
    assert rows[0]["peer"] == "other 2 s" and rows[0]["ratio"] == "2.00"
    assert rows[0]["versions"].endswith("torch 9.9 numpy 8") and rows[0]["hardware"]


def test_columns_equal_those_of_the_stored_history() -> None:
    history = ROOT / "benchmarks" / "results.csv"
    assert tuple(next(csv.reader(history.read_text().splitlines()))) == HISTORY_COLUMNS
