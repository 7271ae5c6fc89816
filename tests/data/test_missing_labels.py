"""Several labels, some of which are missing: prepared, read and checked against Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.missing_labels import ROWS, columns, write
from meseta.data import PrepareOptions, Reader, ReaderOptions
from meseta.data.dataset.check import check_dataset
from meseta.data.prepare import prepare
from meseta.data.prepare.prepare_like import PrepareLikeOptions, prepare_like
from meseta.spec import MesetaError


def options(folder: Path, source: str, **changes: Any) -> PrepareOptions:
    return PrepareOptions(
        sources=[source], out=folder / "out", label=["click", "bought"], ignore=["row"], **{"seed": 3, **changes}
    )


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("recipe_only", [False, True])
def test_a_missing_label_is_masked_and_a_row_without_any_left_out(tmp_path: Path, form: str, recipe_only: bool) -> None:
    table = columns()
    source = write(tmp_path / f"log.{form}", table)
    dataset = prepare(options(tmp_path, source, test_fraction=0.25, recipe_only=recipe_only))
    pairs = [pair for pair in zip(table["click"], table["bought"], strict=True) if pair != (None, None)]
    assert dataset.num_unlabelled == ROWS - len(pairs) > 0
    assert sum(split.num_rows for split in dataset.splits.values()) == len(pairs)
    labels, masks = [], []
    for name, split in dataset.splits.items():
        reader = Reader(tmp_path / "out", name, ReaderOptions(batch_size=100))
        for batch in reader.epoch():
            assert batch.label_mask is not None and not batch.label[~batch.label_mask].any()
            labels.append(batch.label.numpy())
            masks.append(batch.label_mask.numpy())
        split_masks = np.concatenate(masks)[-split.num_rows :]
        assert split.known == dict(zip(dataset.labels, split_masks.sum(0).tolist(), strict=True))
    batch_labels = [
        tuple(int(value) if known else None for value, known in zip(*row, strict=True))
        for row in zip(np.concatenate(labels), np.concatenate(masks), strict=True)
    ]
    assert sorted(batch_labels, key=str) == sorted(pairs, key=str)
    if not recipe_only:
        assert not check_dataset(tmp_path / "out").faults


def test_without_missing_labels_nothing_new_is_written(tmp_path: Path) -> None:
    table = {name: [0 if value is None else value for value in values] for name, values in columns().items()}
    dataset = prepare(options(tmp_path, write(tmp_path / "log.csv", table)))
    text = (tmp_path / "out" / "dataset.json").read_text()
    assert not dataset.masked_labels and "known" not in text and "num_unlabelled" not in text
    assert next(iter(Reader(tmp_path / "out", "train", ReaderOptions(batch_size=8)).epoch())).label_mask is None


def test_a_single_label_must_be_there(tmp_path: Path) -> None:
    source = write(tmp_path / "log.parquet", columns())
    with pytest.raises(MesetaError, match="column 'click': a missing value is not a label"):
        prepare(PrepareOptions(sources=[source], out=tmp_path / "out", label="click", ignore=["row", "bought"]))


def test_other_missing_values_and_wrong_counts_are_faults(tmp_path: Path) -> None:
    prepare(options(tmp_path, write(tmp_path / "log.csv", columns()), test_fraction=0.0))
    description = tmp_path / "out" / "dataset.json"
    document = json.loads(description.read_text())
    document["splits"]["train"]["known"]["click"] -= 1
    description.write_text(json.dumps(document))
    [fault] = check_dataset(tmp_path / "out").faults
    assert "samples must have label 'click'" in str(fault)
    del document["splits"]["train"]["known"]
    description.write_text(json.dumps(document))
    assert {"values must not be missing"} == {fault.rule for fault in check_dataset(tmp_path / "out").faults}
    with pytest.raises(MesetaError, match="column 'click' has a missing value"):
        list(Reader(tmp_path / "out", "train", ReaderOptions(batch_size=8)).epoch())


def test_further_rows_may_lack_labels_too(tmp_path: Path) -> None:
    prepare(options(tmp_path, write(tmp_path / "log.csv", columns())))
    new = columns(1)
    both = [pair for pair in zip(new["click"], new["bought"], strict=True) if pair != (None, None)]
    source = write(tmp_path / "new.parquet", new)
    dataset, _ = prepare_like(PrepareLikeOptions(sources=[source], out=tmp_path / "more", like=tmp_path / "out"))
    assert dataset.num_unlabelled == ROWS - len(both) and not check_dataset(tmp_path / "more").faults
    split = pq.read_table(tmp_path / "more" / "test")
    assert list(zip(split["click"].to_pylist(), split["bought"].to_pylist(), strict=True)) == both
