"""Buckets, crosses, several values in a field of CSV, and its delimiters, against plain Python."""

from __future__ import annotations

import csv
import gzip
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.click_log import hashed, prepare_with, read_split
from meseta.data import Dataset, Reader, ReaderOptions
from meseta.data.formats import text as text_format
from meseta.data.prepare import PrepareOptions, read_layout
from meseta.data.schema.schema import format_schema
from meseta.spec import MesetaError

HEADER = ["click", "age", "city", "user", "genres", "tags"]
SCHEMA = """
label: click
dense: [age]
categorical: [city, genres, tags]
multi_valued: {genres: "|", tags: " "}
weights: {tags: ":"}
buckets: {age: [18, 25.5, 35]}
crosses: {city_x_age: [city, age], city_x_user: [city, user]}
"""


def make_rows(num_rows: int = 150) -> list[list[str]]:
    draw = random.Random(0)

    def several(*values: str) -> list[str]:
        return draw.choices(values, k=draw.randrange(4))

    return [
        [
            str(draw.randrange(2)),
            draw.choice(["", "NA", "17", "18", "25.4", "25.5", "1e3", "-3"]),
            draw.choice(["Paris", "Köln; alt", "a\tb", ""]),
            str(draw.randrange(30)),
            "|".join(several("drama", "comedy", "", "sci fi")),
            " ".join(several("a:0.5", "b:-2", "c:d:1e-3")),
        ]
        for _ in range(num_rows)
    ]


def write(path: Path, rows: list[list[str]], delimiter: str = ",", header: list[str] = HEADER) -> Path:
    lines: list[str] = []

    class Sink:
        def write(self, text: str) -> None:
            lines.append(text)

    csv.writer(Sink(), delimiter=delimiter, lineterminator="\n").writerows([header, *rows])
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def run(tmp_path: Path, name: str, schema: str | None = SCHEMA, **options: Any) -> Dataset:
    return prepare_with(tmp_path, name, schema, **options)


def bucket(age: str) -> int:
    return 0 if age in ("", "NA") else 1 + sum(boundary <= float(age) for boundary in (18, 25.5, 35))


def check(tmp_path: Path, rows: list[list[str]]) -> None:
    table = read_split(tmp_path / "out", "train")
    assert table.column("age.bucket").to_pylist() == [bucket(row[1]) for row in rows]
    expected = [hashed("city_x_age", f"{row[2]}\x1f{bucket(row[1])}") for row in rows]
    assert table.column("city_x_age").to_pylist() == expected
    expected = [hashed("city_x_user", f"{row[2]}\x1f{row[3]}") for row in rows]
    assert table.column("city_x_user").to_pylist() == expected
    assert table.column("city").to_pylist() == [hashed("city", row[2]) for row in rows]


@pytest.mark.parametrize("block_bytes", [8 << 20, 700])
def test_features_made_of_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(text_format, "BLOCK_BYTES", block_bytes)
    rows = make_rows()
    write(tmp_path / "log.csv", rows)
    dataset = run(tmp_path, "log.csv")
    check(tmp_path, rows)
    table = read_split(tmp_path / "out", "train")
    genres = [[value for value in row[4].split("|") if value] for row in rows]
    assert table.column("genres").to_pylist() == [[hashed("genres", value) for value in bag] for bag in genres]
    tags = [[tag.rsplit(":", 1) for tag in row[5].split()] for row in rows]
    assert table.column("tags").to_pylist() == [[hashed("tags", value) for value, _ in bag] for bag in tags]
    weights = pa.array([[float(weight) for _, weight in bag] for bag in tags], pa.list_(pa.float32()))
    assert table.column("tags.weight").combine_chunks().equals(weights)
    features = {s.name: (s.encoding, s.num_embeddings, s.made_of, s.multi_valued, s.weighted) for s in dataset.sparse}
    assert features == {
        "city": ("hash", 500, (), False, False),
        "genres": ("hash", 500, (), True, False),
        "tags": ("hash", 500, (), True, True),
        "age.bucket": ("buckets", 5, ("age",), False, False),
        "city_x_age": ("hash", 500, ("city", "age"), False, False),
        "city_x_user": ("hash", 500, ("city", "user"), False, False),
    }
    (batch,) = Reader(dataset, "train", ReaderOptions(batch_size=1000)).epoch()
    assert batch.sparse["age.bucket"].values.tolist() == [bucket(row[1]) for row in rows]


def test_features_made_of_parquet(tmp_path: Path) -> None:
    rows = make_rows()
    columns = dict(zip(HEADER, zip(*rows, strict=True), strict=True))
    ages = [None if age in ("", "NA") else float(age) for age in columns["age"]]
    table = {"click": list(map(int, columns["click"])), "age": ages, "city": columns["city"]}
    pq.write_table(pa.table({**table, "user": list(map(int, columns["user"]))}), tmp_path / "log.parquet")
    schema = "label: click\ncategorical: [city]\nbuckets: {age: [18, 25.5, 35]}\n"
    dataset = run(tmp_path, "log.parquet", schema + "crosses: {city_x_age: [city, age], city_x_user: [city, user]}\n")
    assert not dataset.dense
    check(tmp_path, rows)


def test_vocabularies_of_crosses(tmp_path: Path) -> None:
    rows = make_rows()
    write(tmp_path / "log.csv", rows)
    dataset = run(tmp_path, "log.csv", vocabulary=True, min_count=2)
    assert {s.encoding for s in dataset.sparse} == {"vocabulary", "buckets"}
    assert [s.num_embeddings for s in dataset.sparse if s.name == "age.bucket"] == [5]
    vocabulary = pq.read_table(tmp_path / "out" / "vocabulary" / "city_x_age.parquet").to_pydict()
    counts = Counter(f"{row[2]}\x1f{bucket(row[1])}" for row in rows)
    assert dict(zip(vocabulary["value"], vocabulary["count"], strict=True)) == {
        None: sum(count for count in counts.values() if count < 2),
        **{value: count for value, count in counts.items() if count >= 2},
    }
    buckets = read_split(tmp_path / "out", "train").column("age.bucket").to_pylist()
    assert buckets == [bucket(row[1]) for row in rows]


@pytest.mark.parametrize(
    ("name", "delimiter", "is_explicit"),
    [
        ("log.csv", ";", False),
        ("log.csv.gz", "|", False),
        ("log.CSV", "\t", False),
        ("log.tsv", "\t", False),
        ("log.tab.gz", "\t", False),
        ("log.txt", ";", True),
        ("log.csv", "^", True),
    ],
)
def test_delimiters(tmp_path: Path, name: str, delimiter: str, is_explicit: bool) -> None:
    rows = make_rows()
    write(tmp_path / name, rows, delimiter)
    run(tmp_path, name, SCHEMA + f'delimiter: "{delimiter}"\n' if is_explicit else SCHEMA)
    check(tmp_path, rows)


def test_the_schema_that_is_printed_holds_all(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", make_rows(5), ";")
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    options = PrepareOptions(sources=[f"{tmp_path}/log.csv"], out=tmp_path / "out", schema=tmp_path / "schema.yaml")
    layout = read_layout(options)
    text = format_schema(layout)
    assert 'delimiter: ";"' in text and "  age: [18, 25.5, 35]" in text
    (tmp_path / "schema.yaml").write_text(text.replace("[18, 25.5, 35]", "4"))
    quantiles = read_layout(options)
    (tmp_path / "schema.yaml").write_text(format_schema(quantiles).replace("age: 4", "age: [18, 25.5, 35]"))
    assert read_layout(options) == layout != quantiles


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buckets: {age: [3, 2]}", r"'buckets.age': \[3.0, 2.0\] must be boundaries in ascending order"),
        ("buckets: {age: []}", "must be boundaries in ascending order"),
        ("buckets: {age: [.nan]}", "must be boundaries in ascending order"),
        ("buckets: {age: 1}", r"or a number of buckets in 2..1000"),
        ("buckets: {age: old}", "key 'buckets.age': input should be"),
        ("buckets: {town: [1]}", "no column 'town'"),
        ("buckets: {city: [1]}", "'buckets.city': the column is under categorical too; buckets are"),
        ("buckets: {user: [1]}\ncrosses: {user.bucket: [city, user]}", "column 'user.bucket' is used twice"),
        ("crosses: {x: [city]}", "'crosses.x': .* must be at least two different columns"),
        ("crosses: {x: [city, city]}", "must be at least two different columns"),
        ("crosses: {x: [city, click]}", "column 'click' has another role"),
        (
            "crosses: {x: [city, genres]}\nmulti_valued: {genres: '|'}",
            "column 'genres' is multi-valued and cannot be crossed",
        ),
        ("crosses: {x: [city, age]}", "column 'age' is dense; list it under buckets or categorical"),
        ("crosses: {x: [city, town]}", "no column 'town'"),
        ("crosses: {city: [tags, user]}", "column 'city' is used twice"),
        ("multi_valued: {user: '|'}", "key 'multi_valued': column 'user' is not under categorical"),
        ("multi_valued: {genres: '||'}", "'multi_valued.genres': '||' must be one ASCII character"),
        (
            "multi_valued: {genres: ':'}\nweights: {genres: ':'}",
            "key 'multi_valued.genres': ':' is the separator of weights too; choose another one",
        ),
        ("delimiter: ';;;;;;;;;'", "key 'delimiter': string should have at most 8 char"),
        ("delimiter: '\"'", "key 'delimiter': '\"' must be 1 to 8 characters without a quote or a line end"),
    ],
)
def test_bad_schemas_are_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "log.csv", make_rows(5))
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, "log.csv", f"label: click\ndense: [age]\ncategorical: [city, genres]\n{text}\n")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (5, "a:1 b", "line 3, column 'tags': 'a:1 b' contains a value without ':' and a weight"),
        (5, "a:x", "line 3, column 'tags': 'a:x' has a weight that is not a finite number"),
        (5, "a:1e39", "has a weight that is not a finite number"),
        (1, "old", "line 3, column 'age': 'old' is not a number"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, place: int, value: str, message: str) -> None:
    good = ["1", "20", "Paris", "7", "drama|comedy", "a:1"]
    bad = [*good[:place], value, *good[place + 1 :]]
    write(tmp_path / "log.csv", [good, bad])
    with pytest.raises(MesetaError, match=message):
        run(tmp_path, "log.csv")


def test_parquet_has_its_own_rules(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0, 1], "age": [1.0, 2.0], "bag": [["a"], ["b"]]}), tmp_path / "log.parquet")
    for text, message in (
        (
            "categorical: [bag]\nmulti_valued: {bag: '|'}",
            "'bag' must be text with values separated by '|', but is list",
        ),
        ("categorical: [bag]\ncrosses: {x: [bag, age]}", "'bag' must hold strings or whole numbers to be crossed"),
        ("categorical: [bag]\nbuckets: {age: [1]}\ncrosses: {x: [age, bag]}", "'bag' must hold strings or whole"),
        ("buckets: {bag: [1]}", "column 'bag' must be a number, but is list"),
    ):
        with pytest.raises(MesetaError, match=message):
            run(tmp_path, "log.parquet", f"label: click\n{text}\n")
