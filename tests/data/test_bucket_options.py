"""Buckets of numbers: columns from options, and those that `meseta train --data` selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from data.click_log import read_split
from meseta.cli.prepare import column_options
from meseta.data import PrepareOptions
from meseta.data.prepare import load_prepared, prepare, read_layout, with_training_defaults
from meseta.data.schema.roles import DEFAULT_NUM_BUCKETS, MAX_DEFAULT_BUCKETIZED
from meseta.spec import MesetaError

NUM_ROWS = 2000


def make_log(**columns: Any) -> pa.Table:
    draw = np.random.default_rng(0)
    price = np.round(draw.lognormal(3, 1, NUM_ROWS), 2)
    return pa.table(
        {
            "label": draw.integers(0, 2, NUM_ROWS),
            "price": pa.array(np.where(draw.random(NUM_ROWS) < 0.2, np.nan, price), from_pandas=True),
            "rate": np.round(draw.random(NUM_ROWS), 3),
            "score": draw.integers(0, 2, NUM_ROWS),
            "shop": pa.array([f"s{number}" for number in draw.integers(0, 9, NUM_ROWS)]),
            **columns,
        }
    )


def write_csv(folder: Path, **columns: Any) -> list[str]:
    pyarrow.csv.write_csv(make_log(**columns), folder / "log.csv")
    return [str(folder / "log.csv")]


def bucket_counts(options: PrepareOptions) -> dict[str, int | None]:
    cut = [column.buckets for column in read_layout(options).sparse if column.buckets]
    return {rule.column: rule.num_quantiles for rule in cut}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_training_on_raw_rows_makes_buckets_of_numbers(tmp_path: Path, kind: str) -> None:
    sources = write_csv(tmp_path)
    if kind == "parquet":
        sources = [str(tmp_path / "log.parquet")]
        pyarrow.parquet.write_table(make_log(), sources[0])
    options = PrepareOptions(sources=sources, out=tmp_path / "out", test_fraction=0.0, valid_fraction=0.0)
    assert not bucket_counts(options)
    options = with_training_defaults(options)
    # The score has two values, so that its buckets would add nothing.
    assert bucket_counts(options) == {"price": DEFAULT_NUM_BUCKETS, "rate": DEFAULT_NUM_BUCKETS}
    prepare(options)
    prices = make_log()["price"].to_numpy()
    present = np.sort(prices[~np.isnan(prices)])
    places = [number * len(present) // DEFAULT_NUM_BUCKETS for number in range(1, DEFAULT_NUM_BUCKETS)]
    buckets = np.where(np.isnan(prices), 0, 1 + np.searchsorted(np.unique(present[places]), prices, "right"))
    written = read_split(tmp_path / "out", "train")["price.bucket"].to_numpy()
    assert np.array_equal(np.sort(written), np.sort(buckets)) and set(buckets) == {*range(DEFAULT_NUM_BUCKETS + 1)}
    # The dataset is found again.
    assert load_prepared(with_training_defaults(options)) is not None


def test_columns_from_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sources": write_csv(tmp_path), "out": tmp_path / "out", "default_buckets": True}
    assert bucket_counts(PrepareOptions(**options, buckets=["r*=5", "price"])) == {"rate": 5, "price": 20}
    assert not bucket_counts(PrepareOptions(**options, buckets=()))
    assert not bucket_counts(PrepareOptions(**options, buckets=["s*"], dense=["price"], sparse=["score"]))
    assert column_options({"buckets": ["none"]}) == {"buckets": ()}
    assert column_options({"buckets": ["a=5,b*"]}) == {"buckets": ["a=5", "b*"]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "shop",
            "column 'shop' for --buckets is read as categorical, but only numbers have buckets; add it to --dense",
        ),
        ("price=1", "--buckets 'price=1': '1' must be a whole number in 2..1000; write --buckets 'price=20'"),
        ("price=many", "'many' must be a whole number in 2..1000"),
        ("cost", "'cost'.*--buckets"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(MesetaError, match=message):
        read_layout(PrepareOptions(sources=write_csv(tmp_path), out=tmp_path / "out", buckets=[entry]))


def test_many_numbers_have_no_buckets(tmp_path: Path) -> None:
    numbers = {f"x{number}": np.arange(NUM_ROWS) / 7 for number in range(MAX_DEFAULT_BUCKETIZED)}
    options = PrepareOptions(sources=write_csv(tmp_path, **numbers), out=tmp_path / "out", default_buckets=True)
    assert not bucket_counts(options)


def test_column_without_training_values(tmp_path: Path) -> None:
    times = np.arange(NUM_ROWS) + 1_700_000_000
    new = pa.array(np.where(np.arange(NUM_ROWS) < 1500, np.nan, np.arange(NUM_ROWS) / 3), from_pandas=True)
    sources = write_csv(tmp_path, new=new, timestamp=times)
    dataset = prepare(PrepareOptions(sources=sources, out=tmp_path / "out", default_buckets=True, split_by="time",
                                     test_fraction=0.25))  # fmt: skip
    sizes = {column.name: column.num_embeddings for column in dataset.sparse}
    assert sizes["new.bucket"] == 2 and sizes["rate.bucket"] == DEFAULT_NUM_BUCKETS + 1


def test_datasets_of_earlier_versions_have_no_buckets(tmp_path: Path) -> None:
    options = PrepareOptions(sources=write_csv(tmp_path), out=tmp_path / "out")
    prepare(PrepareOptions(sources=options.sources, out=options.out, vocabulary=True, min_count=2, valid_fraction=0.1))
    assert load_prepared(with_training_defaults(options)) is not None
    assert not with_training_defaults(options).default_buckets
