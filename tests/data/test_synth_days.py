"""Synthetic logs of several days: equal bytes without changes, new ids, rotating effects, metrics of each day."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

from meseta.cli.data import app
from meseta.data.synth import CHUNK_ROWS, NUM_SPARSE, ClickLog, SynthOptions, category_codes, encode_tsv
from meseta.data.synth.effects import feature_keys, replace_ids
from meseta.spec import MesetaError

STATIC = ClickLog(seed=3, scale=0.001)
CHURNED = ClickLog(seed=3, scale=0.001, churn=0.1)
ROTATED = ClickLog(seed=3, scale=0.001, drift=0.4)
DAYS = np.repeat([0, 1, 2, 3], CHUNK_ROWS // 4)


def run(out: Path, *arguments: str) -> None:
    common = ["synth", "--out", str(out), "--rows", "3_000", "--seed", "3", "--scale", "0.001"]
    result = CliRunner().invoke(app, [*common, *arguments])
    assert result.exit_code == 0, result.output


def test_days_without_changes_write_the_bytes_of_files(tmp_path: Path) -> None:
    run(tmp_path / "files", "--files", "3")
    run(tmp_path / "days", "--days", "3", "--churn", "0", "--drift", "0")
    files, days = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("files", "days"))
    assert sorted(files) == ["day_0.tsv", "day_1.tsv", "day_2.tsv", "teacher.json"]
    assert days == files


def test_each_day_has_its_metrics(tmp_path: Path) -> None:
    run(tmp_path, "--days", "3", "--churn", "0.1", "--drift", "0.4", "--probabilities")
    document = json.loads((tmp_path / "teacher.json").read_text())
    assert (document["churn"], document["drift"]) == (0.1, 0.4)
    static = encode_tsv(STATIC.chunk(0)[:3000]).splitlines(keepends=True)
    for day in range(3):
        lines = (tmp_path / f"day_{day}.tsv").read_bytes().splitlines(keepends=True)
        table = pq.read_table(tmp_path / f"day_{day}.probability.parquet")
        label, probability = table["label"].to_numpy(), table["probability"].to_numpy()
        np.testing.assert_array_equal([int(line[:1]) for line in lines], label)
        metrics = document["files"][f"day_{day}.tsv"]
        assert metrics["num_rows"] == len(lines) == 1000
        assert metrics["auc"] == pytest.approx(roc_auc_score(label, probability), abs=1e-12)
        entropy = stats.bernoulli(label.mean()).entropy()
        assert metrics["ne"] == pytest.approx(log_loss(label, probability) / entropy, rel=1e-12)
        # The first day has no changes, and all later days have some.
        assert (lines == static[1000 * day : 1000 * (day + 1)]) == (day == 0)
        assert [line.split(b"\t")[1:14] for line in lines] == [
            line.split(b"\t")[1:14] for line in static[1000 * day : 1000 * (day + 1)]
        ]


@pytest.mark.parametrize("churn", [0.05, 0.3, 1.0])
def test_new_ids_replace_a_share_of_each_feature_each_day(churn: float) -> None:
    keys, sizes, num_days = feature_keys(5, 3), (10_131, 93, 3), 12
    for feature, size in enumerate(sizes):
        ranks = np.arange(-1, size)
        days = [
            replace_ids(ranks[None], churn * day, keys[feature : feature + 1], (size,))[0] for day in range(num_days)
        ]
        np.testing.assert_array_equal(days[0], ranks)
        seen = set(days[0])
        for yesterday, today in pairwise(days):
            new = set(today) - set(yesterday)
            assert abs(len(new) - churn * size) <= 2 + 1e-3 * size
            assert not new & seen
            assert len(set(today)) == size + 1
            seen |= new
            # Other ids keep their ranks, and the missing value stays.
            kept = np.isin(today, yesterday)
            np.testing.assert_array_equal(today[kept], yesterday[kept])
            assert today[0] == -1
        codes = category_codes(feature, np.array(sorted(seen - {-1})))
        assert len(set(codes)) == len(seen) - 1


def test_rows_have_the_ids_of_their_day() -> None:
    static, rows = STATIC.chunk(0), CHURNED.chunk(0, DAYS)
    np.testing.assert_array_equal(rows.dense, static.dense)
    sizes = np.array(CHURNED.cardinalities)[:, None]
    np.testing.assert_array_equal(np.where(rows.ids < 0, -1, rows.ids % sizes), static.ids)
    np.testing.assert_array_equal(rows.ids[:, DAYS == 0], static.ids[:, DAYS == 0])
    for day in range(1, 4):
        ids = np.unique(rows.ids[2, day == DAYS])
        assert (ids >= CHURNED.cardinalities[2]).mean() == pytest.approx(0.1 * day, abs=0.03)
    # A row depends on its own day, not on those of other rows.
    second = CHURNED.chunk(0, 2)
    np.testing.assert_array_equal(rows.ids[:, DAYS == 2], second.ids[:, DAYS == 2])
    np.testing.assert_array_equal(rows.bins[DAYS == 2], second.bins[DAYS == 2])
    # Rows without new ids keep their probabilities, and others do not.
    same = (rows.ids == static.ids).all(axis=0)
    np.testing.assert_array_equal(rows.bins[same], static.bins[same])
    assert (rows.bins[~same] == static.bins[~same]).mean() < 0.01
    assert 0.25 < same.mean() < 0.6


def effects_of(feature: int, ids: np.ndarray[Any, Any], angle: float) -> np.ndarray[Any, Any]:
    """Return the standardized main effects of `ids` [n], while all other features are missing."""
    columns = np.full((NUM_SPARSE, len(ids)), -1)
    columns[feature] = ids
    return stats.zscore(ROTATED.teacher._parts(np.zeros((13, len(ids)), np.int32), columns, angle)[1])


@pytest.mark.parametrize("day", [1, 6])
def test_effects_correlate_with_those_of_day_0_by_the_cosine(day: int) -> None:
    frequent = [f for f, size in enumerate(ROTATED.cardinalities) if size >= 100]
    for ids, features, tolerance in (
        (np.arange(40), frequent, 0.12),
        # New ids at the first rank have equal sizes, so that each counts.
        (ROTATED.cardinalities[2] * np.arange(1, 4000), [2], 0.05),
    ):
        products = [effects_of(f, ids, 0.0) * effects_of(f, ids, 0.4 * day) for f in features]
        assert np.mean(products) == pytest.approx(math.cos(0.4 * day), abs=tolerance)


def test_rotated_effects_keep_their_size() -> None:
    rows = ROTATED.chunk(0)
    start = [part.std() for part in ROTATED.teacher._parts(rows.dense, rows.ids, 0.0)]
    for angle in (0.4, math.pi / 2):
        parts = ROTATED.teacher._parts(rows.dense, rows.ids, angle)
        assert [part.std() for part in parts] == pytest.approx(start, rel=0.2)
    np.testing.assert_array_equal(rows.bins, STATIC.chunk(0).bins)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--days", "2", "--files", "2"], "--days 2 and --files 2 exclude each other; each day is one file"),
        (["--churn", "0.1"], "--churn and --drift change the log from day to day, so they require --days"),
        (
            ["--files", "2", "--drift", "1"],
            "--churn and --drift change the log from day to day, so they require --days",
        ),
        (["--days", "2", "--churn", "1.5"], "churn must be in 0..1, got 1.5; 0.05 replaces 5 % of ids each day"),
        (["--days", "2", "--churn", "-0.1"], "churn must be in 0..1, got -0.1; 0.05 replaces 5 % of ids each day"),
        (["--days", "2", "--churn", "nan"], "churn must be in 0..1, got nan; 0.05 replaces 5 % of ids each day"),
        (["--days", "2", "--drift", "inf"], "drift must be a finite angle in radians, got inf; try 0.1"),
        (
            ["--days", "0"],
            "each file must have at least one row, but rows is 1000000 and files is 0; specify at least one file, and "
            "at least as many rows as files",
        ),
    ],
)
def test_bad_days_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["synth", "--out", str(tmp_path / "log"), *arguments])
    assert isinstance(result.exception, MesetaError)
    assert str(result.exception) == f"data synth: {message}"
    assert not (tmp_path / "log").exists()


def test_ids_that_exceed_the_codes_are_refused(tmp_path: Path) -> None:
    log = ClickLog(scale=1.0, churn=1.0)
    SynthOptions(out=tmp_path, num_rows=1000, num_files=423, log=log)
    with pytest.raises(MesetaError, match=r"at most 4,294,967,296 ids over all days, but one has 4,295,640,248 in 424"):
        SynthOptions(out=tmp_path, num_rows=1000, num_files=424, log=log)
