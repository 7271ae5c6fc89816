"""Tests of the rows and the end of an epoch: the same global batches for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_reader import NUM_ROWS, global_batches, make_dataset, rows_of
from meseta.data import Batch, Dataset, Reader, ReaderOptions
from meseta.data.read.tensors import pad_batch
from meseta.spec import MesetaError


@pytest.fixture(scope="module")
def jagged(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("policies") / "data", multi_valued=True)


def real(batch: Batch) -> Batch:
    """Return a batch without its padding, which must have weight 0, no ids and zeros."""
    num_real = batch.batch_size - batch.num_padding
    if batch.weight is not None:
        assert batch.weight.tolist() == [1.0] * num_real + [0.0] * batch.num_padding
    assert not batch.dense[num_real:].any()
    assert not batch.label[num_real:].any()
    lengths = batch.sparse.lengths.view(len(batch.sparse.keys), -1)
    assert lengths.shape[1] == batch.batch_size
    assert not lengths[:, num_real:].any()
    sparse = type(batch.sparse)(
        keys=batch.sparse.keys,
        values=batch.sparse.values,
        lengths=lengths[:, :num_real].reshape(-1),
        weights=batch.sparse.weights,
        batch_sizes=(num_real,) * len(batch.sparse.keys),
    )
    return Batch(dense=batch.dense[:num_real], sparse=sparse, label=batch.label[:num_real])


@given(num_ranks=st.integers(1, 5), batch_size=st.sampled_from([95, 138, 551, 700]), shuffle=st.booleans())
@settings(max_examples=8)
def test_padding_fills_the_last_batch_of_an_epoch(
    jagged: Dataset, num_ranks: int, batch_size: int, shuffle: bool
) -> None:
    order = {"batch_size": batch_size, "shuffle": shuffle, "window_rows": 200, "prefetch_batches": 0}
    ranks = [
        list(Reader(jagged, "train", ReaderOptions(last_batch="pad", **order), rank=r, num_ranks=num_ranks).epochs(2))
        for r in range(num_ranks)
    ]
    padded = list(zip(*ranks, strict=True))
    assert all(sum(batch.batch_size for batch in slices) == batch_size for slices in padded)
    per_epoch = -(-NUM_ROWS // batch_size)
    for place, slices in enumerate(padded):
        is_last = place % per_epoch == per_epoch - 1
        expected = per_epoch * batch_size - NUM_ROWS if is_last else 0
        assert sum(batch.num_padding for batch in slices) == expected
        # Ranks agree on whether there are weights, so that they agree on how the loss is divided.
        assert {batch.weight is not None for batch in slices} == {expected > 0}
    rows = [[row for batch in slices for row in rows_of(real(batch))] for slices in padded]
    assert rows == global_batches(jagged, ReaderOptions(**order), 1, num_epochs=2)


def test_weights_and_several_labels_are_padded_too(tmp_path: Path) -> None:
    reader = Reader(make_dataset(tmp_path / "data", multi_valued=False), "train", ReaderOptions(batch_size=3))
    batch = next(reader.epoch())
    full = Batch(
        dense=batch.dense,
        sparse=batch.sparse,
        label=torch.tensor([[1.0, 0.0], [0.5, 1.0], [1.0, 1.0]]),
        weight=torch.tensor([0.5, 2.0, 0.0]),
        group=torch.tensor([7, 8, 9]),
    )
    padded = pad_batch(full, 5)
    assert padded.label.tolist() == [*full.label.tolist(), [0.0, 0.0], [0.0, 0.0]]
    assert padded.weight is not None and padded.weight.tolist() == [0.5, 2.0, 0.0, 0.0, 0.0]
    assert padded.group is not None and padded.group.tolist() == [7, 8, 9, 0, 0]
    assert (padded.batch_size, padded.num_padding, padded.to("cpu").num_padding) == (5, 2, 2)


# Choice of rows


def all_rows(dataset: Dataset, **options: Any) -> list[int]:
    return [
        row
        for batch in Reader(dataset, "train", ReaderOptions(batch_size=64, **options)).epoch()
        for row in rows_of(batch)
    ]


def test_a_filter_leaves_the_rows_that_fulfil_it(jagged: Dataset) -> None:
    # The column holds log(1 + x) = number of the row.
    reader = Reader(jagged, "train", ReaderOptions(batch_size=64, filter=f"d0 >= {np.expm1(100)} and label == 1"))
    expected = [row for row in range(NUM_ROWS) if row >= 100 and row % 2]
    assert [row for batch in reader.epoch() for row in rows_of(batch)] == expected
    assert (reader.num_rows, reader.excluded_rows.by_filter, reader.excluded_rows.negatives) == (
        len(expected), NUM_ROWS - len(expected), 0
    )  # fmt: skip
    assert reader.num_batches == -(-len(expected) // 64)


def test_a_filter_may_leave_nothing(jagged: Dataset) -> None:
    reader = Reader(jagged, "train", ReaderOptions(batch_size=64, filter="label > 2"))
    assert (reader.num_rows, reader.num_batches, list(reader.epoch())) == (0, 0, [])


def test_negatives_are_drawn_by_their_number(jagged: Dataset) -> None:
    kept = {keep: set(all_rows(jagged, negative_keep=keep, seed=3)) for keep in (1.0, 0.5, 0.25, 1e-9)}
    odd = set(range(1, NUM_ROWS, 2))
    assert kept[1.0] == set(range(NUM_ROWS))
    assert kept[1e-9] == odd < kept[0.25] < kept[0.5]  # a smaller share is a part of a larger one
    num_negatives = NUM_ROWS - len(odd)
    for keep in (0.5, 0.25):
        # Five standard deviations of a binomial.
        assert abs(len(kept[keep] - odd) - keep * num_negatives) < 5 * (keep * (1 - keep) * num_negatives) ** 0.5
    assert set(all_rows(jagged, negative_keep=0.5, seed=4)) != kept[0.5]
    assert set(all_rows(jagged, negative_keep=0.5, seed=3, shuffle=True)) == kept[0.5]


@given(num_ranks=st.integers(2, 4), batch_size=st.integers(40, 90), shuffle=st.booleans(), keep=st.floats(0.05, 1.0))
@settings(max_examples=5)
def test_any_number_of_ranks_and_any_moment_of_resuming(
    jagged: Dataset, num_ranks: int, batch_size: int, shuffle: bool, keep: float
) -> None:
    options = ReaderOptions(
        batch_size=batch_size, shuffle=shuffle, seed=1, window_rows=90, negative_keep=keep, prefetch_batches=0,
        filter=f"d0 < {np.expm1(300)} or single == 'unlikely'",
    )  # fmt: skip
    hashed = jagged.sparse[0].model_copy(update={"hash_seed": "0x5"})
    dataset = jagged.model_copy(update={"sparse": (hashed, *jagged.sparse[1:])})
    whole = global_batches(dataset, options, 1, num_epochs=2)
    assert global_batches(dataset, options, num_ranks, num_epochs=2) == whole
    first = Reader(dataset, "train", options)
    batches = first.epochs(2)
    for _ in range(len(whole) // 3):
        next(batches)
    second = Reader(dataset, "train", options)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert [rows_of(batch) for batch in second.epochs(2)] == whole[len(whole) // 3 :]


def test_states_of_another_choice_of_rows_are_refused(jagged: Dataset) -> None:
    def reader(**options: Any) -> Reader:
        return Reader(jagged, "train", ReaderOptions(batch_size=10, **options))

    old = reader().get_state()
    assert "filter" not in old  # states of before there were filters stay good
    with pytest.raises(MesetaError, match=r"saved with negative_keep 1\.0, but this reader has 0\.5"):
        reader(negative_keep=0.5).set_state(old)
    with pytest.raises(MesetaError, match="saved with filter 'label == 1', but this reader has None"):
        reader().set_state(reader(filter="label == 1").get_state())


def test_options_that_cannot_be(jagged: Dataset) -> None:
    for options, message in (
        ({"negative_keep": 0.0}, "negative_keep must be above 0"),
        ({"negative_keep": 1.5}, "negative_keep must be above 0"),
        ({"filter": "nothing == 1"}, "there is no column 'nothing'"),
    ):
        with pytest.raises(MesetaError, match=message):
            Reader(jagged, "train", ReaderOptions(batch_size=1, **options))
    several = jagged.model_copy(update={"labels": ("click", "buy")})
    with pytest.raises(MesetaError, match=r"negative_keep needs one label, .* choose one of click, buy"):
        Reader(several, "train", ReaderOptions(batch_size=1, negative_keep=0.5))
