"""Splits by time and by group, quantiles over the training rows: exact, in bounded memory, whatever the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.click_log import make_lines, read_split, write_tsv
from data.timed_log import make_rows, rows_in, run, write
from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, prepare, survey
from meseta.spec import MesetaError


@given(
    st.lists(st.floats(allow_nan=True, width=64) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=60),
    st.integers(1, 7),
    st.data(),
)
def test_order_statistics_are_those_of_sort(values: list[float], size: int, data: st.DataObject) -> None:
    numbers = np.array(values)
    chunks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    expected = np.sort(numbers[~np.isnan(numbers)])
    assert survey.count_numbers(lambda: iter(chunks)) == expected.size
    if expected.size:
        ranks = data.draw(st.lists(st.integers(0, expected.size - 1), min_size=1, max_size=5))
        assert survey.order_statistics(lambda: iter(chunks), ranks) == expected[ranks].tolist()


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.35, 0.9])
def test_the_last_rows_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    monkeypatch.setattr(survey, "_CHUNK_ROWS", 64)
    rows = make_rows()
    write(tmp_path, rows)
    dataset = run(tmp_path, split_by="time", test_fraction=fraction)
    times = np.array([row["ts"] for row in rows])
    # As many of the last rows as the share allows, without parting equal times.
    allowed = [first for first in np.unique(times) if (times >= first).mean() <= fraction]
    test = times >= (allowed[0] if allowed else np.inf)
    assert rows_in(dataset, "test") == np.flatnonzero(test).tolist()
    assert rows_in(dataset, "train") == np.flatnonzero(~test).tolist()
    assert (dataset.split_by, dataset.test_fraction) == ("time", fraction)
    assert dataset.test_from == (float(allowed[0]) if allowed else None)
    ages = np.sort([row["age"] for row, later in zip(rows, test, strict=True) if not later and row["age"] != ""])
    expected = np.unique(ages[[k * len(ages) // 7 for k in range(1, 7)]])
    [feature] = dataset.sparse
    assert (feature.name, feature.encoding, feature.made_of) == ("age.bucket", "buckets", ("age",))
    assert feature.boundaries == tuple(expected)
    assert feature.num_embeddings == len(expected) + 2
    for split, mask in (("train", ~test), ("test", test)):
        if mask.any():
            kept_ages = [r["age"] for r, kept in zip(rows, mask, strict=True) if kept]
            buckets = [0 if age == "" else 1 + sum(b <= age for b in expected) for age in kept_ages]
            assert read_split(dataset.dir, split).column("age.bucket").to_pylist() == buckets


def test_from_a_time_on(tmp_path: Path) -> None:
    rows = make_rows()
    write(tmp_path, rows)
    for number, value in enumerate(("1700000030", "2023-11-14 22:13:50", "2023-11-14T23:13:50+01:00")):
        dataset = run(tmp_path, f"out{number}", test_after=value)
        assert rows_in(dataset, "test") == [row["row"] for row in rows if row["ts"] >= 1_700_000_030]
        assert (dataset.split_by, dataset.test_fraction, dataset.test_from) == ("time", None, 1_700_000_030.0)


def test_whole_groups(tmp_path: Path) -> None:
    rows = make_rows()
    write(tmp_path, rows)
    dataset = run(tmp_path, split_by="group", test_fraction=0.3, seed=5)
    users = {split: {rows[i]["user"] for i in rows_in(dataset, split)} for split in ("train", "test")}
    assert not users["train"] & users["test"] and len(users["train"] | users["test"]) == 40
    assert 5 <= len(users["test"]) <= 20
    other = run(tmp_path, "other", split_by="group", test_fraction=0.3, seed=6)
    assert {rows[i]["user"] for i in rows_in(other, "test")} != users["test"]


@pytest.mark.parametrize("split_by", ["time", "group"])
def test_the_result_is_a_function_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split_by: str) -> None:
    write(tmp_path, make_rows())
    run(tmp_path, split_by=split_by, test_fraction=0.3)
    write(tmp_path, make_rows(), num_files=3)
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 500)
    run(tmp_path, "parts", split_by=split_by, test_fraction=0.3, num_threads=3)
    for split in ("train", "test"):
        assert read_split(tmp_path / "out", split).equals(read_split(tmp_path / "parts", split))
    assert not list(tmp_path.glob("**/*.f64"))


@pytest.mark.parametrize("stage", ["scan", "read"])
def test_what_was_surveyed_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    write(tmp_path, make_rows(), num_files=2)
    shares = {"split_by": "time", "test_fraction": 0.3, "valid_fraction": 0.2}
    run(tmp_path, "whole", **shares)
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 1000)
    monkeypatch.setattr("meseta.data.prepare.staging.COMMIT_INTERVAL_S", 0.0)
    stages: list[str] = []

    def interrupt(at: str, rows: int, share: float) -> None:
        stages.append(at)
        if at == stage and rows > 200 and stages.count("interrupted") == 0:
            stages.append("interrupted")
            raise KeyboardInterrupt

    options = PrepareOptions(
        sources=[f"{tmp_path}/log-*.csv"],
        out=tmp_path / "out",
        schema=tmp_path / "schema.yaml",
        hash_rows=100,
        num_threads=1,
        **shares,
    )
    with pytest.raises(KeyboardInterrupt):
        prepare(options, interrupt)
    prepare(options, interrupt)
    again = stages[stages.index("interrupted") + 1 :]
    assert ("scan" in again) == (stage == "scan")
    for split in ("train", "valid", "test"):
        assert read_split(tmp_path / "out", split).equals(read_split(tmp_path / "whole", split))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out", "whole"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_by": "user"}, "--split-by must be 'time' or 'group', got 'user'"),
        ({"split_by": "time", "test_files": ["x"]}, "--split-by time and --test-files exclude each other"),
        ({"split_by": "group", "test_after": "1"}, "--split-by group and --test-after exclude each other"),
        ({"test_after": "1", "test_fraction": 0.1}, "exclude each other; use one of them"),
        ({"test_after": "soon"}, "--test-after 'soon' is not a time; use the form 2026-01-31"),
        ({"test_after": ""}, "--test-after '' is not a time"),
        ({"test_after": "2000-01-01"}, "none of 400 rows is left for training; give a later --test-after"),
    ],
)
def test_bad_splits_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write(tmp_path, make_rows())
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ts": ""}, "log-0.csv', row 1: the row has no time, so it cannot be split by time"),
        ({"ts": "soon"}, "line 2, column 'ts': 'soon' is not a time"),
        ({"ts": "7"}, "prepare: the last 0.5 of the rows have the same time 7 as rows before them"),
    ],
)
def test_bad_columns_are_named(tmp_path: Path, change: dict[str, str], message: str) -> None:
    write(tmp_path, [{**row, **change} for row in make_rows()])
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, split_by="time", test_fraction=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-0.csv", "schema.yaml"]


def test_data_without_the_column(tmp_path: Path) -> None:
    write_tsv(tmp_path / "log.tsv", make_lines(5))
    for by in ("time", "group"):
        with pytest.raises(MesetaError, match=f"--split-by {by} needs a column, but none has this role"):
            prepare(PrepareOptions(sources=[f"{tmp_path}/log.tsv"], out=tmp_path / "out", split_by=by))
