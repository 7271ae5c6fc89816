"""Tests of the validation split: its rows, computed with plain arithmetic on the raw rows."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.click_log import make_lines, read_split, write_tsv
from data.timed_log import NUM_ROWS, make_rows, rows_in, run, write
from meseta.data import Dataset
from meseta.data.dataset.check import check_dataset
from meseta.data.dataset.describe import describe
from meseta.data.dataset.encoding import row_difference
from meseta.data.prepare import PrepareOptions, load_prepared, prepare, with_training_defaults
from meseta.report.data_page import data_page
from meseta.spec import MesetaError

SPLITS = ("train", "valid", "test")


def word(counter: int, *key: int) -> float:
    """The random number in [0, 1) of a row or a group: SplitMix64's finaliser, in whole numbers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    base = 0
    for part in key:
        base = mix(((base ^ part) + 0x9E3779B97F4A7C15) % 2**64)
    return mix((counter * 0x9E3779B97F4A7C15 + base) % 2**64) / 2**64


def rows_of(dataset: Dataset) -> dict[str, list[int]]:
    return {split: rows_in(dataset, split) for split in dataset.splits}


def expected(rows: list[dict[str, Any]], kept: dict[str, Any]) -> dict[str, list[int]]:
    """Numbers of the rows per split, where `kept` says whether a row is in 'test' or 'valid'."""
    names = ["test" if kept["test"](row) else "valid" if kept["valid"](row) else "train" for row in rows]
    return {split: [place for place, name in enumerate(names) if name == split] for split in SPLITS}


def test_rows_drawn_by_seed(tmp_path: Path) -> None:
    rows = make_rows()
    write(tmp_path, rows)
    without = run(tmp_path, "without", test_fraction=0.2, seed=4)
    dataset = run(tmp_path, test_fraction=0.2, valid_fraction=0.15, seed=4)
    numbers = [word(row, 4) for row in range(NUM_ROWS)]
    assert rows_of(dataset) == {
        "train": [row for row, x in enumerate(numbers) if x >= 0.35],
        "valid": [row for row, x in enumerate(numbers) if 0.2 <= x < 0.35],
        "test": [row for row, x in enumerate(numbers) if x < 0.2],
    }
    assert rows_in(without, "test") == rows_in(dataset, "test")
    assert sorted(rows_in(dataset, "train") + rows_in(dataset, "valid")) == rows_in(without, "train")
    assert (dataset.test_fraction, dataset.valid_fraction, dataset.valid_from) == (0.2, 0.15, None)
    assert (without.valid_fraction, list(without.splits), list(dataset.splits)) == (None, ["train", "test"], [*SPLITS])
    label = {split: read_split(dataset.dir, split).column("label").to_pylist() for split in SPLITS}
    assert label == {split: [rows[i]["click"] for i in places] for split, places in rows_of(dataset).items()}


def test_all_that_is_counted_is_counted_on_the_training_rows(tmp_path: Path) -> None:
    rows = make_rows()
    write(tmp_path, rows)
    (tmp_path / "schema.yaml").write_text("label: click\ndense: [row]\ncategorical: [user]\nbuckets: {age: 7}\n")
    dataset = run(tmp_path, test_fraction=0.2, valid_fraction=0.3, vocabulary=True, min_count=1)
    train = [rows[i] for i in rows_in(dataset, "train")]
    [dense] = dataset.dense
    logs = np.log1p([row["row"] for row in train])
    assert (dense.mean, dense.std) == (pytest.approx(logs.mean(), rel=1e-6), pytest.approx(logs.std(), rel=1e-6))
    user, age = dataset.sparse
    assert user.vocabulary is not None
    vocabulary = pq.read_table(dataset.dir / user.vocabulary).slice(1).to_pydict()
    users = [row["user"] for row in train]
    assert dict(zip(vocabulary["value"], vocabulary["count"], strict=True)) == {u: users.count(u) for u in users}
    assert user.statistics.num_rows == user.statistics.num_lookups == len(train)
    ages = np.sort([row["age"] for row in train if row["age"] != ""])
    assert age.boundaries == tuple(np.unique(ages[[k * len(ages) // 7 for k in range(1, 7)]]))


def test_whole_groups(tmp_path: Path) -> None:
    rows = make_rows()
    write(tmp_path, rows)
    shares = {"split_by": "group", "test_fraction": 0.3, "seed": 5}
    without = run(tmp_path, "without", **shares)
    dataset = run(tmp_path, valid_fraction=0.25, **shares)
    users = {split: {rows[i]["user"] for i in places} for split, places in rows_of(dataset).items()}
    assert sum(map(len, users.values())) == len(set.union(*users.values())) == 40
    assert rows_in(dataset, "test") == rows_in(without, "test")
    keys = {split: set(read_split(dataset.dir, split).column("user").to_pylist()) for split in SPLITS}
    for split, low, high in (("test", 0.0, 0.3), ("valid", 0.3, 0.55), ("train", 0.55, 1.0)):
        assert all(low <= word(key % 2**64, 5, 1) < high for key in keys[split])


def last_part(times: list[int], share: float, until: float) -> float | None:
    """The first time of the largest last part of the rows before `until` that is no larger than this share of all."""
    before = [time for time in times if time < until]
    fits = [first for first in set(before) if sum(time >= first for time in before) <= int(len(times) * share)]
    return min(fits, default=None)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    st.sampled_from([0.1, 0.2, 0.45]),
)
def test_the_last_rows_in_time_and_those_just_before_them(times: list[int], test: float, valid: float) -> None:
    test_from = last_part(times, test, np.inf) if int(len(times) * test) else None
    end = np.inf if test_from is None else test_from
    valid_from = last_part(times, valid, end)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "log-0.csv").write_text("click,ts,row\n" + "".join(f"1,{t},{row}\n" for row, t in enumerate(times)))
        (path / "schema.yaml").write_text("label: click\ntime: ts\ndense: [row]\n")
        try:
            dataset = run(path, split_by="time", test_fraction=test, valid_fraction=valid)
        except MesetaError as error:
            # Nothing but times too equal to be parted, or too few rows, is refused.
            too_equal = (test_from is None and int(len(times) * test)) or valid_from is None
            none_left = valid_from is not None and min(times) >= valid_from
            assert too_equal or none_left or int(len(times) * valid) >= sum(t < end for t in times), error
            return
        assert (dataset.test_from, dataset.valid_from) == (test_from, valid_from)
        kept = {"test": lambda t: t >= end, "valid": lambda t: t >= valid_from}
        # Standardized values do not identify one row, or rows of one value.
        sizes = {split: len(places) for split, places in expected(times, kept).items()}  # type: ignore[arg-type]
        assert {name: split.num_rows for name, split in dataset.splits.items()} == sizes


@pytest.mark.parametrize(
    ("options", "test_from", "valid_from"),
    [
        ({"test_after": "1700000030", "valid_after": "2023-11-14 22:13:40"}, 1_700_000_030, 1_700_000_020),
        ({"test_after": "1700000040", "valid_fraction": 0.2}, 1_700_000_040, None),
        ({"valid_after": "1700000020", "test_fraction": 0.3}, None, 1_700_000_020),
        ({"valid_after": "1700000020", "test_fraction": 0.0}, np.inf, 1_700_000_020),
        ({"split_by": "time", "valid_fraction": 0.2, "test_fraction": 0.3}, None, None),
    ],
)
def test_times_and_shares_of_the_time(
    tmp_path: Path, options: dict[str, Any], test_from: float | None, valid_from: float | None
) -> None:
    rows = make_rows()
    write(tmp_path, rows, num_files=2)
    dataset = run(tmp_path, **options)
    times = [row["ts"] for row in rows]
    test_from = test_from or last_part(times, 0.3, np.inf)
    assert test_from is not None
    valid_from = valid_from or last_part(times, 0.2, test_from)
    kept = {"test": lambda row: row["ts"] >= test_from, "valid": lambda row: row["ts"] >= valid_from}
    expected_rows = expected(rows, kept)
    assert rows_of(dataset) == expected_rows
    assert (dataset.split_by, dataset.valid_from) == ("time", valid_from)
    assert dataset.test_from == (None if test_from == np.inf else test_from)
    assert (dataset.valid_fraction, dataset.test_fraction) == tuple(
        options.get(f"{name}_fraction") for name in ("valid", "test")
    )
    ages = np.sort([rows[i]["age"] for i in expected_rows["train"] if rows[i]["age"] != ""])
    assert dataset.sparse[0].boundaries == tuple(np.unique(ages[[k * len(ages) // 7 for k in range(1, 7)]]))


FILES = [
    # Three files of 134, 133 and 133 rows; those that go as a whole are read last.
    ({"valid_files": "1", "test_files": "2"}, {0: "train", 1: "valid", 2: "test"}),
    ({"valid_files": "2", "test_fraction": 0.3}, {0: (0.0, 0.3), 1: (0.0, 0.3), 2: "valid"}),
    ({"valid_files": "2"}, {0: (0.0, 0.1), 1: (0.0, 0.1), 2: "valid"}),
    ({"test_files": "0", "valid_fraction": 0.3}, {0: "test", 1: (0.3, 0.0), 2: (0.3, 0.0)}),
]


@pytest.mark.parametrize(("options", "where"), FILES)
def test_files_and_shares_of_the_others(tmp_path: Path, options: dict[str, Any], where: dict[int, Any]) -> None:
    rows = make_rows()
    write(tmp_path, rows, num_files=3)
    settings = {k: [f"{tmp_path}/log-{v}.csv"] if k.endswith("files") else v for k, v in options.items()}
    dataset = run(tmp_path, **settings)
    expected_rows: dict[str, list[int]] = {split: [] for split in SPLITS}
    drawn = 0
    for number, part in enumerate(np.array_split(np.arange(NUM_ROWS), 3)):
        for row in part:
            name = where[number]
            if not isinstance(name, str):
                valid, test = name
                x = word(drawn, 0)
                name = "test" if x < test else "valid" if x < test + valid else "train"
                drawn += 1
            expected_rows[name].append(int(row))
    assert rows_of(dataset) == expected_rows
    splits = {Path(source.path).name: source.split for source in dataset.sources}
    assert splits == {f"log-{n}.csv": name if isinstance(name, str) else "both" for n, name in where.items()}


def test_a_file_for_testing_and_the_last_rows_of_the_others(tmp_path: Path) -> None:
    """Times of the test file count for nothing, not even where they are missing or the latest."""
    rows = make_rows()
    write(tmp_path, [{**row, "ts": "" if row["row"] % 2 else 2e9} if row["row"] >= 200 else row for row in rows], 2)
    files = {"test_files": [f"{tmp_path}/log-1.csv"]}
    dataset = run(tmp_path, split_by="time", valid_fraction=0.3, **files)
    valid_from = last_part([row["ts"] for row in rows[:200]], 0.3, np.inf)
    assert valid_from is not None
    kept = {"test": lambda row: row["row"] >= 200, "valid": lambda row: row["ts"] >= valid_from}
    assert rows_of(dataset) == expected(rows, kept)
    assert (dataset.test_from, dataset.valid_from) == (None, valid_from)
    assert rows_of(run(tmp_path, "after", valid_after=str(valid_from), **files)) == rows_of(dataset)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid_fraction": 0.1, "valid_files": ["x"]}, "--valid-fraction and --valid-files exclude each other; use"),
        ({"valid_after": "1", "valid_files": ["x"]}, "--valid-files and --valid-after exclude each other; use one"),
        (
            {"test_fraction": 0.5, "valid_fraction": 0.5},
            "--test-fraction 0.5 and --valid-fraction 0.5 leave no row for",
        ),
        ({"valid_fraction": 0.9}, "--test-fraction 0.1 and --valid-fraction 0.9 leave no row for training; decrease"),
        ({"valid_fraction": -0.1}, r"--valid-fraction must be in \[0, 1\), got -0.1"),
        ({"valid_after": "1", "split_by": "group"}, "--split-by group and --valid-after exclude each other; use one"),
        (
            {"valid_files": ["x"], "test_files": ["y"], "split_by": "group"},
            "--split-by group and --test-files and --valid-files exclude each other; use one",
        ),
        ({"valid_after": "soon"}, "--valid-after 'soon' is not a time"),
        (
            {"valid_after": "9", "test_after": "9"},
            "--valid-after is 9 in seconds, but the test split begins at 9; use",
        ),
        ({"valid_after": "1700000049"}, "but the test split begins at 17000000..; use an earlier --valid-after"),
        (
            {"test_after": "1700000001", "valid_fraction": 0.5},
            ".* before the test split; use a smaller --valid-f",
        ),
        (
            {"valid_fraction": 1e-9},
            "none of 400 rows is in the valid split; raise --valid-fraction, or omit the split",
        ),
        ({"valid_after": "1", "test_after": "2"}, "none of 400 rows is left for training; give a later"),
        ({"valid_files": ["{log}-*.csv"]}, "no source is left for training; every file is in --valid-files"),
        (
            {"valid_files": ["{log}-0.csv"], "test_files": ["{log}-?.csv"]},
            "log-0.csv' is in --valid-files and in --test-files; remove it from one",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write(tmp_path, make_rows(), num_files=2)
    log = f"{tmp_path}/log"
    options = {k: [v.format(log=log) for v in vs] if isinstance(vs, list) else vs for k, vs in options.items()}
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-0.csv", "log-1.csv", "schema.yaml"]


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"valid_after": "0"}, "give a later --valid-after or lower --test-fraction"),
        ({"test_after": "1", "valid_after": "0"}, "give a later --valid-after or give a later --test-after"),
    ],
)
def test_no_row_for_training(tmp_path: Path, options: dict[str, Any], way_out: str) -> None:
    (tmp_path / "schema.yaml").write_text("label: click\ntime: ts\ndense: [row]\n")
    (tmp_path / "log-0.csv").write_text("click,ts,row\n" + "".join(f"1,{row},{row}\n" for row in range(20)))
    with pytest.raises(MesetaError, match=f"none of 20 rows is left for training; {way_out}"):
        run(tmp_path, **options)


def test_times_too_equal_to_be_parted(tmp_path: Path) -> None:
    write(tmp_path, [{**row, "ts": 7 + (row["row"] >= 390)} for row in make_rows()])
    message = (
        "the last 0.1 of the rows before the test split have the same time 7 .* larger --valid-fraction or --valid-a"
    )
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, split_by="time", valid_fraction=0.1)


def test_a_share_of_0_is_no_valid_split(tmp_path: Path) -> None:
    write(tmp_path, make_rows())
    assert list(run(tmp_path, valid_fraction=0.0).splits) == ["train", "test"]


def test_check_describe_and_the_comparison_of_rows_know_it(tmp_path: Path) -> None:
    write(tmp_path, make_rows())
    dataset = run(tmp_path, valid_fraction=0.2)
    assert check_dataset(dataset.dir).faults == () and check_dataset(dataset.dir).num_rows == NUM_ROWS
    figures = describe(dataset)
    assert {name: split.num_rows for name, split in figures.splits.items()} == {
        name: split.num_rows for name, split in dataset.splits.items()
    }
    assert figures.splits["valid"].labels == {"label": dataset.splits["valid"].num_positives}
    assert "<td>valid</td>" in data_page("x", dataset, figures)
    other = run(tmp_path, "other", valid_fraction=0.2)
    assert row_difference(dataset, other) is None
    more = dataset.splits["valid"].model_copy(update={"num_positives": 1.5})
    changed = other.model_copy(update={"splits": {**other.splits, "valid": more}})
    assert "splits" in (row_difference(dataset, changed) or "")
    part = dataset.dir / "valid/part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.set_column(0, "label", [[1.0] * (table.num_rows - 1) + [7.0]]).cast(table.schema), part)
    assert [fault.object.split(",")[0] for fault in check_dataset(dataset.dir).faults] == ["valid/part-00000.parquet"]


def test_the_teacher_is_that_of_the_test_split(tmp_path: Path) -> None:
    figures = {"auc": 0.8, "ne": 0.7}
    files = {"a.tsv": {"auc": 0.81, "ne": 0.71}, "b.tsv": {"auc": 0.82, "ne": 0.72}}
    (tmp_path / "teacher.json").write_text(json.dumps({"all": figures, "files": files}))
    for name in files:
        write_tsv(tmp_path / name, make_lines(50))

    def teacher(out: str, **options: Any) -> float | None:
        dataset = prepare(PrepareOptions(sources=[f"{tmp_path}/*.tsv"], out=tmp_path / out, **options))
        return dataset.teacher.auc if dataset.teacher else None

    assert teacher("drawn", valid_fraction=0.2) == 0.8
    assert teacher("file", valid_fraction=0.2, test_files=[f"{tmp_path}/b.tsv"]) == 0.82
    assert teacher("rest", valid_files=[f"{tmp_path}/b.tsv"]) is None


def test_a_folder_of_before_counts_as_prepared_with_the_same_options(tmp_path: Path) -> None:
    """Datasets and records of a version that knew no valid split."""
    write_tsv(tmp_path / "log.tsv", make_lines(100))
    options = PrepareOptions(sources=[f"{tmp_path}/log.tsv"], out=tmp_path / "out")
    prepare(options)
    for name, keys in (("dataset.json", ("valid_fraction", "valid_from")), ("prepare.json", ("options",))):
        document = json.loads((tmp_path / "out" / name).read_text())
        if name == "prepare.json":
            document["options"] = {k: v for k, v in document["options"].items() if not k.startswith("valid_")}
        else:
            for key in keys:
                assert document.pop(key) is None
        (tmp_path / "out" / name).write_text(json.dumps(document))
    loaded = load_prepared(options)
    assert loaded is not None and loaded.valid_fraction is None
    assert load_prepared(with_training_defaults(options)) == loaded
    asked = PrepareOptions(sources=options.sources, out=options.out, valid_fraction=0.2)
    assert with_training_defaults(asked) == asked  # and keeps hashing
    with pytest.raises(MesetaError, match=r"the option valid_fraction was null and is 0\.2 now"):
        load_prepared(asked)
    elsewhere = PrepareOptions(sources=options.sources, out=tmp_path / "elsewhere")
    assert prepare(with_training_defaults(elsewhere)).valid_fraction == 0.1
    assert load_prepared(with_training_defaults(elsewhere)) is not None
    assert with_training_defaults(elsewhere).vocabulary and with_training_defaults(elsewhere).min_count == 2
    rare = PrepareOptions(sources=options.sources, out=tmp_path / "rare", vocabulary=True, min_count=7)
    assert load_prepared(with_training_defaults(rare)) is None and prepare(rare) == load_prepared(
        with_training_defaults(rare)
    )
