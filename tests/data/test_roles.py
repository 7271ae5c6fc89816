"""Labels, weights, groups and times of samples: inferred or by a schema, from CSV, Parquet and libsvm."""

from __future__ import annotations

import csv
import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file
from xxhash import xxh64_intdigest

from data.click_log import read_split
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.formats import text as text_format
from meseta.data.formats.table_rows import group_keys, parse_times
from meseta.data.prepare import PrepareOptions, prepare, read_layout
from meseta.data.schema.infer import infer_role
from meseta.data.schema.schema import format_schema
from meseta.spec import MesetaError

HEADER = ["click", "buy", "weight", "user_id", "price", "time"]
SCHEMA = """
labels: [click, buy]
weight: weight
group: user_id
time: time
dense: [price]
categorical: [user_id]
"""


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def key(value: str) -> int:
    """Return the key of a group by its definition."""
    is_whole = value == str(int(value)) if value.lstrip("-").isascii() and value.lstrip("-").isdigit() else False
    return int(value) if is_whole and len(value.lstrip("-")) <= 18 else signed(xxh64_intdigest(value.encode()))


def make_rows(num_rows: int) -> list[list[str]]:
    draw = random.Random(0)
    first = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        [
            str(draw.randrange(2)),
            draw.choice(["0", "1", "0.5"]),
            draw.choice(["0", "0.25", "1e9", "3"]),
            draw.choice(["17", "-4", "0", "007", "ann", "köln", "", "9" * 19]),
            str(row),
            (first + timedelta(seconds=61.5 * row)).isoformat().replace("+00:00", draw.choice(["", "Z", "+00:00"])),
        ]
        for row in range(num_rows)
    ]


def run(tmp_path: Path, name: str, **options: Any) -> Dataset:
    settings = {"test_fraction": 0.0, "hash_rows": 500, "out": tmp_path / "out", **options}
    return prepare(PrepareOptions(sources=[str(tmp_path / name)], **settings))


def write_csv(path: Path, rows: list[list[str]], header: list[str] = HEADER, delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def write_schema(tmp_path: Path, text: str = SCHEMA) -> Path:
    (tmp_path / "schema.yaml").write_text(text)
    return tmp_path / "schema.yaml"


def write_parquet(path: Path, rows: list[list[str]]) -> None:
    columns = dict(zip(HEADER, zip(*rows, strict=True), strict=True))
    times = [datetime.fromisoformat(time).replace(tzinfo=UTC) for time in columns["time"]]
    numbers = {name: [float(value) for value in columns[name]] for name in ("click", "buy", "weight", "price")}
    pq.write_table(pa.table({**numbers, "user_id": columns["user_id"], "time": times}), path)


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_schema_gives_the_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 900)
    rows = make_rows(120)
    (write_csv if name == "log.csv" else write_parquet)(tmp_path / name, rows)
    dataset = run(tmp_path, name, schema=write_schema(tmp_path))
    assert (dataset.labels, dataset.weight, dataset.group, dataset.time) == (
        ("click", "buy"),
        "weight",
        "user_id.group",
        "time",
    )
    assert dataset.splits["train"].positives == {
        label: sum(float(row[place]) for row in rows) for place, label in enumerate(("click", "buy"))
    }
    assert dataset.splits["train"].num_positives == dataset.splits["train"].positives["click"]
    table = read_split(tmp_path / "out", "train")
    for place, column in enumerate(("click", "buy", "weight")):
        assert table.column(column).type == pa.float32()
        assert table.column(column).to_pylist() == [float(row[place]) for row in rows]
    assert table.column("user_id.group").to_pylist() == [key(row[3]) for row in rows]
    assert table.column("time").to_pylist() == [
        datetime.fromisoformat(row[5]).replace(tzinfo=UTC).timestamp() for row in rows
    ]
    seed = xxh64_intdigest(b"user_id", 0)
    assert table.column("user_id").to_pylist() == [xxh64_intdigest(r[3].encode(), seed) * 500 >> 64 for r in rows]
    (batch,) = Reader(dataset, "train", ReaderOptions(batch_size=200)).epoch()
    assert batch.label.tolist() == [[float(row[0]), float(row[1])] for row in rows]
    assert batch.weight is not None and batch.group is not None
    assert batch.weight.tolist() == [float(row[2]) for row in rows]
    assert batch.group.tolist() == [key(row[3]) for row in rows]


def test_roles_are_inferred_and_printed(tmp_path: Path) -> None:
    header = ["click", "conversion", "sample_weight", "qid", "price", "timestamp", "date"]
    rows = [
        [*row[:3], str(i % 5), row[4], str(1_700_000_000_000 + i), "2026-01-01"] for i, row in enumerate(make_rows(60))
    ]
    write_csv(tmp_path / "log.csv", rows, header)
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    times = [datetime(2026, 1, 1, tzinfo=UTC)] * 60
    numbers = {name: [float(v) for v in columns[name]] for name in ("click", "conversion", "sample_weight", "price")}
    table = {
        **numbers,
        "qid": list(map(int, columns["qid"])),
        "timestamp": list(map(int, columns["timestamp"])),
        "date": times,
    }
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    for name in ("log.csv", "log.parquet"):
        layout = read_layout(PrepareOptions(sources=[str(tmp_path / name)], out=tmp_path / "out"))
        assert (layout.labels, layout.weight, layout.group, layout.time) == (
            ("click",),
            "sample_weight",
            "qid",
            "timestamp",
        )
        features = ["price", "timestamp.age", "timestamp.hour", "timestamp.weekday"]
        assert (layout.feature_names, layout.ignored) == (features, ("conversion", "date"))
        assert "if it is a feature, put it under dense" in layout.reasons["sample_weight"]
        assert "in ms" in layout.reasons["timestamp"]
        assert "list both under labels" in layout.reasons["conversion"]
        again = PrepareOptions(
            sources=[str(tmp_path / name)], out=tmp_path / "out", schema=write_schema(tmp_path, format_schema(layout))
        )
        assert read_layout(again) == layout
        run(tmp_path, name, force=True)
        prepared = read_split(tmp_path / "out", "train")
        assert prepared.column("timestamp").to_pylist() == [(1_700_000_000_000 + i) / 1000 for i in range(60)]
        assert prepared.column("qid").to_pylist() == [i % 5 for i in range(60)]


@pytest.mark.parametrize(
    ("name", "values", "role"),
    [
        ("weight", ["0", "1.5"], "weight"),
        ("Sample_Weight", ["1"], "weight"),
        ("weight", ["1", ""], "dense"),
        ("weight", ["-1"], "dense"),
        ("weight", ["1e10"], "dense"),
        ("weight", ["heavy"], "categorical"),
        ("weights", ["1"], "dense"),
        ("time", ["12", "60"], "dense"),
        ("ts", ["1700000000", ""], "time"),
        ("day", ["2026-01-01"], "ignore"),
        ("date", ["2026-01-01"], "time"),
        ("date", ["20260101"], "dense"),
        ("qid", ["a", "b"], "group"),
        ("query_id", ["1", "2"], "categorical"),
        ("converted", ["1", "0"], "ignore"),
        ("target", ["1", "0"], "dense"),
    ],
)
def test_roles_are_guessed_with_care(name: str, values: list[str], role: str) -> None:
    assert infer_role(name, values).role == role


@pytest.mark.parametrize("block_bytes", [8 << 20, 300])
def test_groups_of_libsvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    draw = np.random.default_rng(0)
    values = (draw.random((80, 9)) < 0.3) * 1.0
    values[3] = 0  # a row without a pair
    groups = np.sort(draw.integers(0, 10**12, 80))
    dump_svmlight_file(values, draw.integers(0, 2, 80), str(tmp_path / "log.svm"), query_id=groups)
    dataset = run(tmp_path, "log.svm")
    assert (dataset.group, dataset.sparse[0].weighted) == ("qid", False)
    table = read_split(tmp_path / "out", "train")
    assert table.column("qid").to_pylist() == groups.tolist()
    assert [len(bag) for bag in table.column("features").to_pylist()] == (values > 0).sum(1).tolist()


def test_a_block_without_groups_after_one_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", 12)
    (tmp_path / "log.svm").write_text("1 qid:3 1:1\n" * 3 + "0 1:1\n" * 9)
    with pytest.raises(
        MesetaError, match=r"log.svm', line \d+: .*either all rows or none must have a qid .*; this row has none"
    ):
        run(tmp_path, "log.svm")


ZONES = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(hours=8))])


@given(st.lists(st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1), timezones=ZONES), min_size=1), st.booleans())
def test_times_are_those_of_datetime(moments: list[datetime], with_t: bool) -> None:
    texts = ["", *(moment.isoformat("T" if with_t else " ") for moment in moments)]
    times = parse_times(pa.array(texts).cast(pa.binary()))
    expected = [m.replace(tzinfo=m.tzinfo or UTC).timestamp() for m in moments]
    np.testing.assert_allclose(times, [np.nan, *expected], rtol=1e-12, atol=1e-5)


def test_times_as_numbers_and_days() -> None:
    times = parse_times(pa.array(["1700000000", "1700000000000", "1700000000000000", "1700000000000000000", "-5", "0"]))
    assert times.tolist() == [1.7e9] * 4 + [-5, 0]
    assert parse_times(pa.array(["1970-01-02"])).tolist() == [86400]
    for bad in (["1", "2026-01-01"], ["2026-13-01"], ["inf"], ["soon"], ["\udcff".encode("utf-8", "surrogateescape")]):
        with pytest.raises(pa.ArrowInvalid):
            parse_times(pa.array(bad))


@given(
    st.lists(
        st.one_of(st.integers(-(10**20), 10**20).map(str), st.text(max_size=5), st.sampled_from(["-0", "+1", "01"]))
    )
)
def test_keys_of_groups(values: list[str]) -> None:
    for kind in (pa.string(), pa.binary(), pa.large_string()):
        assert group_keys(pa.array([v.encode() for v in values], pa.binary()).cast(kind)).tolist() == [
            key(v) for v in values
        ]


GOOD = ["1", "0", "1", "a", "2", "2026-01-01"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, "2", "line 3, column 'buy': '2' is outside 0..1"),
        (1, "soon", "line 3, column 'buy': 'soon' is not a label"),
        (2, "-1", "line 3, column 'weight': '-1' is not a sample weight: weights must be 0, or 1e-09 to 1e.09"),
        (2, "", "column 'weight': '' is not a sample weight"),
        (2, "inf", "column 'weight': 'inf' is not a sample weight"),
        (2, "heavy", "column 'weight': 'heavy' is not a number"),
        (5, "soon", "line 3, column 'time': 'soon' is not a time: write times as 2026-01-31 23:59:59"),
        (5, "12", "line 3, column 'time': '12' is not a time"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, place: int, value: str, message: str) -> None:
    bad = list(GOOD)
    bad[place] = value
    write_csv(tmp_path / "log.csv", [GOOD, bad])
    with pytest.raises(MesetaError, match=message) as error:
        run(tmp_path, "log.csv", schema=write_schema(tmp_path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("weight", ["a", "b"], "column 'weight' must be a number, but is string"),
        ("weight", [1.0, None], "row 2, column 'weight': a missing value is not a sample weight"),
        ("time", [[1], [2]], "column 'time' must be a time, but is list"),
        ("time", ["2026-01-01", "x"], "row 2, column 'time': 'x' is not a time"),
        ("group", [0.0, 1.5], "row 2, column 'group': 1.5 is not a whole number"),
        ("group", [[1], [2]], "column 'group' must hold strings or integers, but is list"),
    ],
)
def test_bad_columns_of_parquet(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    table = {"y": [0, 1], "a": [1.0, 2.0], "weight": [1.0, 1.0], "time": [1, 2], "group": [1.0, None], column: values}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    schema = write_schema(tmp_path, "label: y\ndense: [a]\nweight: weight\ntime: time\ngroup: group\n")
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, "log.parquet", schema=schema)


def test_groups_of_floats_and_missing_ones(tmp_path: Path) -> None:
    table = {"y": [0, 1, 1], "a": [1.0, 2.0, 3.0], "user": [1.0, None, float("nan")]}
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    run(tmp_path, "log.parquet", schema=write_schema(tmp_path, "label: y\ndense: [a]\ngroup: user\n"))
    assert read_split(tmp_path / "out", "train").column("user").to_pylist() == [1, key(""), key("")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("labels: [click, click]\ndense: [price]", "column 'click' is named twice"),
        ("label: click\nweight: price\ndense: [price]", "column 'price' is named twice"),
        ("label: click\ntime: click\ndense: [price]", "column 'click' is named twice"),
        ("label: click\ngroup: price\ndense: [price]", "column 'price' is named twice"),
        ("label: click\ngroup: usr_id\ndense: [price]", "no column 'usr_id'; did you mean 'user_id'"),
    ],
)
def test_bad_roles_are_named(tmp_path: Path, text: str, message: str) -> None:
    write_csv(tmp_path / "log.csv", [GOOD])
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, "log.csv", schema=write_schema(tmp_path, text))


def test_a_column_of_times_may_be_named(tmp_path: Path) -> None:
    """It is ignored, and so is a second one if a column is named like a time."""
    hours = [f"2026-01-{1 + row // 24:02}T{row % 24:02}:00:00Z" for row in range(96)]
    lines = [f"{row % 2},{hour},{hours[-1 - row]},c{row % 5}" for row, hour in enumerate(hours)]
    (tmp_path / "log.csv").write_text("click,seen,ts,city\n" + "\n".join(lines) + "\n")

    def split(**options: Any) -> dict[str, int]:
        made = PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path / str(len(options)), **options)
        return {name: split.num_rows for name, split in prepare(made).splits.items()}

    layout = read_layout(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path))
    assert (layout.time, layout.other_times) == ("ts", ("seen",))
    layout = read_layout(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path, time=["seen"]))
    assert (layout.time, layout.other_times) == ("seen", ("ts",)) and "another time" in layout.reasons["ts"]
    layout = read_layout(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path, ignore=["seen", "ts"]))
    assert (layout.time, layout.other_times) == (None, ())
    assert split(test_after="2026-01-04") == {"train": 72, "test": 24}
    assert split(test_after="2026-01-04 12:00", time=["seen"]) == {"train": 84, "test": 12}
    for time, problem in ((["s*", "ts"], "but rows have only one time"), (["gone"], "has no column 'gone'")):
        with pytest.raises(MesetaError, match=problem):
            read_layout(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path, time=time))
    with pytest.raises(MesetaError, match="named by --time and as a feature"):
        read_layout(PrepareOptions(sources=[str(tmp_path / "log.csv")], out=tmp_path, time=["seen"], sparse=["seen"]))
