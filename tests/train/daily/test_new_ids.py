"""New ids of samples against sets of Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meseta.data import Batch
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import MesetaError
from meseta.train.daily.new_ids import NewIds

ROWS = {"word": 21, "hash": 9, "old": 5}


def dataset(rows: dict[str, int] = ROWS) -> Any:
    encodings = {"word": "vocabulary"}
    sparse = [SimpleNamespace(name=n, num_embeddings=k, encoding=encodings.get(n, "hash")) for n, k in rows.items()]
    return SimpleNamespace(sparse=sparse, dir="day2")


def batch(samples: dict[str, list[list[int]]]) -> Batch:
    size = len(next(iter(samples.values())))
    return Batch(dense=torch.zeros(size, 1), sparse=KeyedJaggedTensor.from_lists(samples), label=torch.zeros(size))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, set[int]], dict[str, list[list[int]]]]:
    """Return new rows by feature, without one of the features, and ids of samples."""
    new = {name: draw(st.sets(st.integers(0, ROWS[name] - 1))) for name in ("word", "hash")}
    size = draw(st.integers(0, 6))
    single = draw(st.booleans())
    counts = st.just(1) if single else st.integers(0, 4)

    def bag(rows: int) -> list[int]:
        count = draw(counts)
        return draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count))

    return new, {name: [bag(rows) for _ in range(size)] for name, rows in ROWS.items()}


@given(cases())
def test_samples_with_new_ids(case: tuple[dict[str, set[int]], dict[str, list[list[int]]]]) -> None:
    new, samples = case
    masks = {name: np.isin(np.arange(ROWS[name]), sorted(rows)) for name, rows in new.items()}
    new_ids = NewIds(dataset(), masks)
    new["word"] |= {0}
    expected = [
        any(id in rows for name, rows in new.items() for id in samples[name][k]) for k in range(len(samples["word"]))
    ]
    made = batch(samples)
    assert new_ids.of_batch(made).tolist() == expected
    for name, rows in new.items():
        ids = np.arange(ROWS[name])
        assert set(ids[new_ids.mask(name, ids)].tolist()) == rows
    hidden = new_ids.hide(made).sparse
    for name, bags in samples.items():
        seen = [[0 if name == "word" and id in new["word"] else id for id in one] for one in bags]
        assert hidden[name].values.tolist() == [id for one in seen for id in one]
        assert hidden[name].lengths.tolist() == [len(one) for one in seen]
    assert made.sparse["word"].values.tolist() == [id for one in samples["word"] for id in one]


def test_features_without_a_mask_have_no_new_ids() -> None:
    new_ids = NewIds(dataset(), {})
    assert new_ids.features == ()
    assert not new_ids.of_batch(batch({"word": [[0], [3]], "hash": [[1], []], "old": [[], [2]]})).any()


def test_ids_outside_of_their_table_raise_no_error() -> None:
    new_ids = NewIds(dataset(), {"hash": np.ones(9, np.bool_)})
    assert len(new_ids.of_batch(batch({"word": [[0]], "hash": [[-9, 10**12]], "old": [[2]]}))) == 1


@pytest.mark.parametrize(("name", "rows", "problem"), [("hash", 8, "has 9 rows"), ("hush", 9, "has no such feature")])
def test_masks_that_do_not_fit(name: str, rows: int, problem: str) -> None:
    with pytest.raises(MesetaError, match=f"'{name}' has {rows} rows, but dataset 'day2' {problem}"):
        NewIds(dataset(), {name: np.ones(rows, np.bool_)})
