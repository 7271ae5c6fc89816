"""Tests of comparisons of encodings: other values, means, buckets, seeds or orders are reported by name."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meseta.data import Dataset
from meseta.data.dataset.check import check_dataset
from meseta.data.dataset.encoding import (
    DatasetEncoding,
    encoding_difference,
    uncomparable_parts,
    with_vocabulary_digests,
)
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.read.selection import RowFilter
from meseta.spec import MesetaError

NUM_ROWS = 400
SCHEMA = {"label": "click", "dense": ["price"], "categorical": ["city", "shop"], "buckets": {"age": [30, 50]}}
SCHEMA = {**SCHEMA, "crosses": {"both": ["city", "age"]}}


def columns() -> dict[str, list[Any]]:
    draw = np.random.default_rng(3)
    return {
        "click": draw.integers(0, 2, NUM_ROWS).tolist(),
        "price": draw.random(NUM_ROWS).tolist(),
        "age": draw.integers(0, 90, NUM_ROWS).tolist(),
        "city": [f"c{int(20 * x**2)}" for x in draw.random(NUM_ROWS)],
        "shop": [f"s{i}" for i in draw.integers(0, 9, NUM_ROWS)],
    }


def prepared(
    folder: Path, table: dict[str, list[Any]], schema: dict[str, Any] | None = None, **options: Any
) -> Dataset:
    folder.mkdir(parents=True)
    pq.write_table(pa.table(table), folder / "raw.parquet")
    (folder / "schema.yaml").write_text(json.dumps(schema or SCHEMA))
    options = {"vocabulary": True, "min_count": 1, "schema": folder / "schema.yaml", **options}
    return prepare(PrepareOptions(sources=[str(folder / "raw.parquet")], out=folder / "data", **options))


def swapped(city: str) -> str:
    return {"c0": "c19", "c19": "c0"}.get(city, city)


def with_column(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, list[Any]]], dict[str, list[Any]]]:
    return lambda table: {**table, name: [change(value) for value in table[name]]}


def with_schema(**changes: Any) -> dict[str, Any]:
    return {**SCHEMA, **changes}


SAME = with_column("price", lambda value: value)
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "vocabulary": (with_column("city", swapped), SCHEMA, {}, "sparse feature 'city': vocabulary, whose SHA-256 was"),
    "mean": (with_column("price", lambda p: 3 * p), SCHEMA, {}, "dense column 'price': mean, which was"),
    "boundary": (SAME, with_schema(buckets={"age": [30, 40]}), {},
                 "sparse feature 'age.bucket': buckets, whose boundary 2 was 50.0 and is 40.0 now"),
    "buckets": (SAME, with_schema(buckets={"age": [30]}), {}, "buckets, whose boundaries were 2 and are 1 now"),
    "seed": (SAME, SCHEMA, {"vocabulary": False, "seed": 5, "test_fraction": 0.0}, "'city': seed of the hash, which"),
    "order": (SAME, with_schema(categorical=["shop", "city"]), {},
              "order of the sparse features: number 1 was 'city' and is 'shop' now"),
    "cross": (SAME, with_schema(crosses={"both": ["shop", "age"]}), {},
              "'both': columns that it is made of, which was 'city, age' and is 'shop, age' now"),
    "name": (SAME, with_schema(crosses={"pair": ["city", "age"]}), {}, "sparse feature 'both' is missing now"),
    "label": (lambda table: {"buy": table["click"], **table}, with_schema(label="buy"), {},
              "label, which was column 'click' and is 'buy' now"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_named(name: str, tmp_path: Path) -> None:
    change, schema, options, message = CASES[name]
    kind = {key: value for key, value in options.items() if key != "seed"}
    before = prepared(tmp_path / "before", columns(), **kind)
    now = prepared(tmp_path / "now", change(columns()), schema, **options)
    if name == "vocabulary":  # not derivable from other fields
        assert [f.num_embeddings for f in before.sparse] == [f.num_embeddings for f in now.sparse]
    difference = encoding_difference(DatasetEncoding.from_dataset(before), DatasetEncoding.from_dataset(now))
    assert difference is not None and message in difference


def test_equal_content_is_equal_in_any_folder(tmp_path: Path) -> None:
    before, now = (prepared(tmp_path / name, columns(), num_threads=n) for n, name in ((1, "one"), (3, "other")))
    assert encoding_difference(DatasetEncoding.from_dataset(before), DatasetEncoding.from_dataset(now)) is None
    assert (
        DatasetEncoding.from_dataset(before)
        == DatasetEncoding.from_dataset(now)
        == DatasetEncoding.from_dict(DatasetEncoding.from_dataset(now).to_dict(), "x")
    )
    assert {f.name: f.vocabulary_digest is not None for f in now.sparse} == {
        "city": True, "shop": True, "age.bucket": False, "both": True,
    }  # fmt: skip


def test_the_digest_is_that_of_the_values_in_their_order(tmp_path: Path) -> None:
    [city, *_] = prepared(tmp_path / "a", columns()).sparse
    values = [v.encode() for v in pq.read_table(tmp_path / "a/data" / str(city.vocabulary))["value"].to_pylist()[1:]]
    plain = b"".join(struct.pack("<q", len(value)) for value in values) + b"".join(values)
    assert city.vocabulary_digest == hashlib.sha256(plain).hexdigest()


def older(path: Path) -> Dataset:
    """The dataset as a version wrote it that kept neither digests nor the label's name."""
    document = json.loads((path / "dataset.json").read_text())
    del document["label_source"]
    for feature in document["sparse"]:
        del feature["vocabulary_digest"]
    (path / "dataset.json").write_text(json.dumps(document))
    return Dataset.load(path)


def test_older_datasets_are_read_from_their_files(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "a", columns())
    old = older(tmp_path / "a/data")
    assert with_vocabulary_digests(old).sparse == whole.sparse
    for file in (tmp_path / "a/data/vocabulary").iterdir():
        file.unlink()
    nothing = DatasetEncoding.from_dataset(with_vocabulary_digests(old))
    assert encoding_difference(DatasetEncoding.from_dataset(whole), nothing) is None
    assert uncomparable_parts(DatasetEncoding.from_dataset(whole), nothing) == [
        "the name of the label", "the vocabulary of 'city'", "the vocabulary of 'shop'", "the vocabulary of 'both'",
    ]  # fmt: skip
    assert uncomparable_parts(nothing, nothing) == []


def test_a_vocabulary_that_was_changed_behind_the_description(tmp_path: Path) -> None:
    dataset = prepared(tmp_path / "a", columns())
    file = tmp_path / "a/data/vocabulary/city.parquet"
    table = pq.read_table(file)
    values = pa.array([v if v is None else swapped(v) for v in table["value"].to_pylist()], pa.large_string())
    pq.write_table(table.set_column(0, "value", values), file)
    [fault] = check_dataset(tmp_path / "a/data").faults
    assert "vocabulary/city.parquet: the SHA-256 of the values must be" in str(fault)
    with pytest.raises(MesetaError, match=r"city.parquet' is not the one that the ids of 'city' were made with"):
        RowFilter("city == 'c0'", dataset)


def test_what_is_no_encoding_is_refused() -> None:
    for document in (3, {}, {"labels": ["a"], "dense": [{"name": 1}], "sparse": []}):
        with pytest.raises(MesetaError, match=r"checkpoint 'x': encoding: .*; use an older file"):
            DatasetEncoding.from_dict(document, "checkpoint 'x'")
