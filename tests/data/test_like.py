"""Tests of `prepare --like`: new rows are encoded as in the earlier dataset, with and without labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bad_input.commands import run_here
from data.new_files import (
    KINDS,
    NUM_ROWS,
    NUM_TRAIN,
    SCHEMA,
    Table,
    columns,
    of_csv,
    part,
    svm_lines,
    without,
    write_csv,
    write_lines,
    write_parquet,
)  # fmt: skip
from meseta.data import Reader, ReaderOptions
from meseta.data.dataset.check import check_dataset
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.encoding import DatasetEncoding
from meseta.data.hash_categories import reference
from meseta.data.prepare import PrepareOptions, prepare
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.spec import MesetaError


def like(folder: Path, source: Path, earlier: Path, out: str = "like", **options: Any) -> Dataset:
    return prepare_like(PrepareLikeOptions(sources=[str(source)], out=folder / out, like=earlier, **options))[0]


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_become_what_they_were(tmp_path: Path, kind: str, vocabulary: bool) -> None:
    train, test, new, options = KINDS[kind](tmp_path)
    both = PrepareOptions(
        sources=list(map(str, train)), test_files=[str(test)], out=tmp_path / "data", hash_rows=70,
        vocabulary=vocabulary, min_count=2, seed=5, **options,
    )  # fmt: skip
    before = prepare(both)
    expected = pq.read_table(tmp_path / "data/test")
    labelled = like(tmp_path, test, tmp_path / "data")
    assert DatasetEncoding.from_dataset(labelled) == DatasetEncoding.from_dataset(before) and labelled.has_labels
    assert pq.read_table(tmp_path / "like/test").equals(expected)
    assert labelled.splits["test"].num_positives == before.splits["test"].num_positives
    bare = like(tmp_path, new, tmp_path / "like", "bare")  # a dataset like one is one to be like, too
    assert DatasetEncoding.from_dataset(bare) == DatasetEncoding.from_dataset(before) and not bare.has_labels
    gone = {"label", before.weight}
    assert pq.read_table(tmp_path / "bare/test").equals(
        expected.drop_columns([n for n in expected.column_names if n in gone])
    )
    assert (bare.weight, bare.group, bare.time) == (None, before.group, before.time)
    assert not check_dataset(tmp_path / "like").faults and not check_dataset(tmp_path / "bare").faults
    batches = list(Reader(bare, "test", ReaderOptions(batch_size=64)).epoch())
    assert all(np.isnan(batch.label.numpy()).all() for batch in batches) and sum(b.batch_size for b in batches) == 150


def two_files(folder: Path, **options: Any) -> tuple[Table, Path]:
    """The raw rows of the test split, and a dataset of single-valued columns."""
    table = without(columns(), "tags")
    (folder / "schema.yaml").write_text(
        json.dumps({**SCHEMA, "categorical": ["shop", "city", "hour"], **options.pop("roles", {})})
    )
    train = write_csv(folder / "train.csv", part(table, 0, NUM_TRAIN))
    rest = part(table, NUM_TRAIN, NUM_ROWS)
    test = write_csv(folder / "test.csv", rest)
    options = {"schema": folder / "schema.yaml", "hash_rows": 70, **options}
    prepare(PrepareOptions(sources=[str(train)], test_files=[str(test)], out=folder / "data", **options))
    return rest, folder / "data"


def test_csv_and_parquet_are_interchangeable(tmp_path: Path) -> None:
    rest, data = two_files(tmp_path)
    like(tmp_path, write_parquet(tmp_path / "test.parquet", rest), data)
    assert pq.read_table(tmp_path / "like/test").equals(pq.read_table(data / "test"))


def test_several_files_come_in_their_order(tmp_path: Path) -> None:
    rest, data = two_files(tmp_path)
    write_csv(tmp_path / "new-1.csv", part(rest, 0, 40))
    shuffled = dict(sorted(part(rest, 40, 150).items()))
    write_csv(tmp_path / "new-2.csv", shuffled)
    dataset = like(tmp_path, tmp_path / "new-*.csv", data)
    assert pq.read_table(tmp_path / "like/test").equals(pq.read_table(data / "test"))
    assert [source.num_rows for source in dataset.sources] == [40, 110]


def test_parts_and_row_groups_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meseta.data.prepare import prepare_like as module

    rest, data = two_files(tmp_path)
    monkeypatch.setattr(module, "ROW_GROUP_ROWS", 16)
    monkeypatch.setattr(module, "WINDOW_SAMPLES", 8)
    files = like(tmp_path, write_csv(tmp_path / "new.csv", rest), data).splits["test"].files
    assert [file.num_rows for file in files] == [64, 64, 22]
    assert pq.read_metadata(tmp_path / "like" / files[0].path).num_row_groups == 4
    assert pq.read_table(tmp_path / "like/test").equals(pq.read_table(data / "test"))


@pytest.mark.parametrize("vocabulary", [False, True])
def test_the_share_of_new_values(tmp_path: Path, vocabulary: bool) -> None:
    rest, data = two_files(tmp_path, vocabulary=vocabulary, min_count=3)
    table = without(columns(), "tags")
    _, unseen = prepare_like(PrepareLikeOptions(sources=[str(tmp_path / "test.csv")], out=tmp_path / "like", like=data))
    seeds = {feature.name: feature.hash_seed for feature in Dataset.load(data).sparse}
    for feature, column in (("shop", "shop"), ("city", "city"), ("hour.category", "hour")):
        train, new = ([str(value) for value in rows[column]] for rows in (part(table, 0, NUM_TRAIN), rest))
        if vocabulary:
            known = {value for value in train if train.count(value) >= 3}
            share = sum(value not in known for value in new) / len(new)
        else:
            hashed = [reference.hash_to_rows(v, 70, int(seeds[feature] or "", 16)).tolist() for v in (train, new)]
            share = sum(row not in hashed[0] for row in hashed[1]) / len(new)
        assert dict(unseen.shares())[feature] == pytest.approx(share, abs=1e-12), feature
    shares = [share for _, share in unseen.shares()]
    assert shares == sorted(shares, reverse=True) and "age.bucket" not in dict(unseen.shares()) and shares[0] > 0


def test_unknown_facts_are_reported(tmp_path: Path) -> None:
    """A dataset of an older version keeps neither how its files were written nor which rows training has touched."""
    _, data = two_files(tmp_path)
    document = json.loads((data / "dataset.json").read_text())
    for name in ("source_form", "touched", "has_labels"):
        document.pop(name)
    (data / "dataset.json").write_text(json.dumps(document))
    ended = run_here("prepare", tmp_path / "test.csv", "--like", data, "--out", tmp_path / "like")
    assert ended.code == 0 and "unseen values for hour.category" not in ended.err
    assert "unseen values for shop, city, hour.category, city_x_age" in ended.out
    assert pq.read_table(tmp_path / "like/test").equals(pq.read_table(data / "test"))


REFUSED: dict[str, tuple[Callable[[Table], Table], str]] = {
    "features": (lambda t: without(t, "price", "shop"), "lacks 'shop', 'price'; the model needs all features"),
    "crossed": (lambda t: without(t, "age"), "lacks 'age'; the model"),
    "weight": (lambda t: without(t, "importance"), "lacks 'importance'; it is the sample weight, which is needed with"),
    "twice": (lambda t: {**t, " city": t["city"]}, "two columns have the name 'city'"),
    "text": (lambda t: {**t, "price": ["dear"] * 150}, "line 2, column 'price': 'dear' is not a number"),
    "label": (lambda t: {**t, "click": [7] * 150}, "line 2, column 'click': '7' is outside 0..1"),
}  # fmt: skip


def test_what_is_refused(tmp_path: Path) -> None:
    rest, data = two_files(tmp_path)
    for name, (change, message) in REFUSED.items():
        source = write_csv(tmp_path / f"{name}.csv", change(rest))
        ended = run_here("prepare", source, "--like", data, "--out", tmp_path / "like")
        assert ended.code == 1 and len(ended.errors) == 1 and message in ended.errors[0], (name, ended.err)
        assert not list(tmp_path.glob("like*"))
    ended = run_here("prepare", source, "--like", data, "--out", tmp_path / "like", "--seed", 3, "--vocabulary")
    assert ended.errors == [
        "error: prepare: --seed, --vocabulary cannot be combined with --like, which determines the encoding; omit one"
    ]
    ended = run_here("prepare", tmp_path / "test.csv", "--like", tmp_path, "--out", tmp_path / "like")
    assert ended.code == 1 and "cannot read dataset.json" in ended.err
    lines = write_lines(tmp_path / "old.ffm", svm_lines(fields=True))
    prepare(PrepareOptions(sources=[str(lines)], out=tmp_path / "ffm"))
    with pytest.raises(
        MesetaError, match=r"is CSV, but dataset .* was prepared from libffm text; use files of that form"
    ):
        like(tmp_path, tmp_path / "test.csv", tmp_path / "ffm")


def test_one_of_two_labels_is_too_few(tmp_path: Path) -> None:
    table = columns()
    small = {"click": table["click"], "buy": [row % 2 for row in range(NUM_ROWS)], "shop": table["shop"]}
    source = write_csv(tmp_path / "two.csv", small)
    options = PrepareOptions(sources=[str(source)], out=tmp_path / "data", label=["click", "buy"])
    prepare(options)
    with pytest.raises(MesetaError, match="has no column 'buy', but other labels are present; provide all labels"):
        like(tmp_path, write_csv(tmp_path / "one.csv", without(small, "buy")), tmp_path / "data")
    bare = like(tmp_path, write_csv(tmp_path / "none.csv", without(small, "buy", "click")), tmp_path / "data")
    assert bare.labels == ("click", "buy") and not bare.has_labels and bare.splits["test"].positives == {}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_empty_labels_are_none(tmp_path: Path, kind: str) -> None:
    rest, data = two_files(tmp_path)
    write = {"csv": write_csv, "parquet": write_parquet}[kind]
    bare = like(tmp_path, write(tmp_path / f"bare.{kind}", without(rest, "click", "importance")), data, "bare")
    empty = like(tmp_path, write(tmp_path / f"empty.{kind}", {**rest, "click": [None] * 150}), data, "empty")
    assert not bare.has_labels and not empty.has_labels
    assert pq.read_table(tmp_path / "empty/test").equals(pq.read_table(tmp_path / "bare/test"))


def test_bad_rows_may_be_left_out(tmp_path: Path) -> None:
    rest, data = two_files(tmp_path)
    broken = {**rest, "price": ["dear" if row == 7 else value for row, value in enumerate(rest["price"])]}
    source = write_csv(tmp_path / "broken.csv", broken)
    ended = run_here("prepare", source, "--like", data, "--out", tmp_path / "like", "--bad-rows", "skip")
    assert ended.code == 0 and "1 rows could not be parsed and were omitted" in ended.out
    kept = pq.read_table(data / "test").filter(pa.array(row != 7 for row in range(150)))
    assert pq.read_table(tmp_path / "like/test").equals(kept)


def test_an_interrupt_leaves_nothing_and_force_replaces(tmp_path: Path) -> None:
    _, data = two_files(tmp_path)
    options = PrepareLikeOptions(sources=[str(tmp_path / "test.csv")], out=tmp_path / "like", like=data)

    def interrupt(rows: int, share: float) -> None:
        if rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_like(options, interrupt)
    assert not list(tmp_path.glob("like*"))
    prepare_like(options)
    with pytest.raises(MesetaError, match="exists; choose another --out, or replace it with --force"):
        prepare_like(options)
    like(tmp_path, tmp_path / "test.csv", data, force=True)


def test_a_description_that_does_not_hold_together(tmp_path: Path) -> None:
    """An untrusted dataset.json with fields that `prepare` never writes is refused in one line."""
    train, test, _, options = of_csv(tmp_path)
    prepare(PrepareOptions(sources=[str(train[0])], out=tmp_path / "data", vocabulary=True, min_count=1, **options))
    whole = (tmp_path / "data/dataset.json").read_text()

    def feature(document: dict[str, Any], name: str) -> dict[str, Any]:
        return next(one for one in [*document["dense"], *document["sparse"]] if one["name"] == name)

    cases: dict[str, Callable[[dict[str, Any]], Any]] = {
        "were filled with 1": lambda d: feature(d, "price").update(fill=1.0),
        "buckets of 'age.bucket' must be of one column": lambda d: feature(d, "age.bucket").update(made_of=[]),
        "make another table": lambda d: feature(d, "age.bucket").update(num_embeddings=9),
        "source_form has no format of the values of 'tags'": lambda d: d["source_form"]["separators"].clear(),
        "which is no feature": lambda d: d["source_form"]["separators"].update(price="|"),
        "source_form names another": lambda d: d["source_form"].update(group="city"),
        "which are no columns of these labels": lambda d: d["source_form"].update(labels=["a", "b"]),
        "'shop' is used twice": lambda d: (d.update(label_source=None), d["source_form"].update(labels=["shop"])),
        "must be 1 to 8 characters": lambda d: d["source_form"].update(delimiter="\n"),
        "must have 4 rows": lambda d: feature(d, "city").update(num_embeddings=4),
        "cannot be read": lambda d: feature(d, "city").update(vocabulary="vocabulary/none.parquet"),
        "is not the one that the ids": lambda d: feature(d, "city").update(vocabulary_digest="0" * 64),
        "source_form.kind": lambda d: d["source_form"].update(kind="xlsx"),
        "'touched'": lambda d: d.update(touched="/etc/hostname"),
    }  # fmt: skip
    for message, change in cases.items():
        document = json.loads(whole)
        change(document)
        (tmp_path / "data/dataset.json").write_text(json.dumps(document))
        ended = run_here("prepare", test, "--like", tmp_path / "data", "--out", tmp_path / "like")
        is_named = message.strip("'") in ended.err
        assert ended.code == 1 and len(ended.errors) == 1 and is_named and not (tmp_path / "like").exists(), (
            message,
            ended.err,
        )
