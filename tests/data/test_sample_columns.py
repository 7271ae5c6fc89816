"""Several labels, weights, groups and times: from the columns of a dataset to batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meseta.data import Batch, Dataset, Reader, ReaderOptions
from meseta.data.dataset.records import DataFile, DenseFeature, Split
from meseta.spec import MesetaError

NUM_ROWS = 230


def make(folder: Path, **roles: Any) -> Dataset:
    """A dataset whose every value encodes its row, with labels, a weight, a group and a time."""
    rows = np.arange(NUM_ROWS)
    columns = {
        "click": (rows % 2).astype(np.float32),
        "buy": (rows % 3 == 0).astype(np.float32),
        "w": (rows / 4).astype(np.float32),
        "user": rows * 2**40 - 7,
        "when": rows.astype(np.float64),
        "price": rows.astype(np.float32),
    }
    (folder / "train").mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "train" / "part.parquet", row_group_size=50)
    file = DataFile(path="train/part.parquet", num_rows=NUM_ROWS)
    dataset = Dataset(
        **roles,
        dense=(DenseFeature(name="price", fill=0.0, mean=0.0, std=1.0),),
        sparse=(),
        splits={"train": Split(num_rows=NUM_ROWS, num_positives=115.0, files=(file,))},
    )
    dataset.save(folder)
    return Dataset.load(folder)


ROLES = {"labels": ("click", "buy"), "weight": "w", "group": "user", "time": "when"}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_row_keeps_its_labels_weight_and_group(tmp_path: Path, shuffle: bool, num_ranks: int) -> None:
    dataset = make(tmp_path / "data", **ROLES)
    options = ReaderOptions(batch_size=64, shuffle=shuffle, window_rows=100)
    seen: list[int] = []
    for rank in range(num_ranks):
        for batch in Reader(dataset, "train", options, rank=rank, num_ranks=num_ranks).epoch():
            rows = batch.dense[:, 0].to(torch.int64)
            seen += rows.tolist()
            assert batch.label.dtype == torch.float32 and batch.label.shape == (len(rows), 2)
            assert batch.label.tolist() == [[row % 2, float(row % 3 == 0)] for row in rows.tolist()]
            assert batch.weight is not None and batch.weight.dtype == torch.float32
            assert batch.weight.tolist() == [row / 4 for row in rows.tolist()]
            assert batch.group is not None and batch.group.dtype == torch.int64
            assert batch.group.tolist() == [row * 2**40 - 7 for row in rows.tolist()]
            assert batch.batch_size == len(rows)
            assert_same(batch.to("cpu"), batch)
    assert sorted(seen) == list(range(NUM_ROWS))


def assert_same(moved: Batch, batch: Batch) -> None:
    for name in ("dense", "label", "weight", "group"):
        assert torch.equal(getattr(moved, name), getattr(batch, name))


def test_a_batch_without_them_has_none(tmp_path: Path) -> None:
    dataset = make(tmp_path / "data", labels=("click",))
    batch = next(iter(Reader(dataset, "train", ReaderOptions(batch_size=10)).epoch()))
    assert batch.label.shape == (10,) and batch.batch_size == 10
    assert batch.weight is None and batch.group is None
    moved = batch.to("cpu")
    assert moved.weight is None and moved.group is None
    assert replace(batch, label=torch.zeros(10, 3)).batch_size == 10


@pytest.mark.parametrize("role", ["labels", "weight", "group"])
def test_a_file_without_such_a_column_is_refused(tmp_path: Path, role: str) -> None:
    roles = {**ROLES, role: ("click", "gone") if role == "labels" else "gone"}
    with pytest.raises(MesetaError, match=r"has no column 'gone'; prepare the dataset again"):
        Reader(make(tmp_path / "data", **roles), "train", ReaderOptions(batch_size=10))


def test_one_column_has_one_role() -> None:
    splits = {"train": {"num_rows": 0, "num_positives": 0, "files": []}}
    document = {"format": "meseta.dataset/1", "dense": [], "sparse": [], "splits": splits}
    for roles in ({"labels": ["a", "a"]}, {"labels": ["a"], "weight": "a"}, {"group": "t", "time": "t"}):
        with pytest.raises(MesetaError, match="is named twice"):
            Dataset.from_dict({**document, **roles})
    with pytest.raises(MesetaError, match="labels"):
        Dataset.from_dict({**document, "labels": []})


def test_a_description_from_before_there_were_several_labels_is_read(tmp_path: Path) -> None:
    dataset = make(tmp_path / "data", labels=("click",))
    document = {key: value for key, value in dataset.to_dict().items() if key not in ("labels", "weight", "group")}
    (tmp_path / "data" / "dataset.json").write_text(json.dumps({**document, "label": "label"}))
    assert Dataset.load(tmp_path / "data").labels == ("label",)


def test_some_labels_of_several(tmp_path: Path) -> None:
    dataset = make(tmp_path / "data", **ROLES)
    positives = {"click": 115.0, "buy": 77.0}
    dataset = dataset.model_copy(
        update={"splits": {"train": dataset.splits["train"].model_copy(update={"positives": positives})}}
    )
    assert dataset.with_labels(None) is dataset
    buy = dataset.with_labels(["buy"])
    assert buy.labels == ("buy",) and buy.splits["train"].num_positives == 77.0
    batch = next(iter(Reader(buy, "train", ReaderOptions(batch_size=4)).epoch()))
    assert batch.label.tolist() == [float(row % 3 == 0) for row in batch.dense[:, 0].tolist()]
    swapped = next(iter(Reader(dataset.with_labels(["buy", "click"]), "train", ReaderOptions(batch_size=4)).epoch()))
    assert swapped.label.tolist() == [[float(row % 3 == 0), row % 2] for row in swapped.dense[:, 0].tolist()]
    for names, message in (
        (["bye"], "'bye' is not a label .* did you mean 'buy'"),
        (["buy", "buy"], "'buy' occurs 2 times"),
    ):
        with pytest.raises(MesetaError, match=message):
            dataset.with_labels(names)
