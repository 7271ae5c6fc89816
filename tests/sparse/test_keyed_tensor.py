"""Tests of the outputs of an embedding: columns by feature and rows by feature."""

import pytest
import torch

from meseta.sparse import JaggedTensor
from meseta.sparse.keyed_tensor import Embeddings, KeyedTensor
from meseta.spec import MesetaError

POOLED = KeyedTensor(keys=("a", "b"), dims=(2, 3), values=torch.arange(10.0).reshape(2, 5))


def test_features_are_columns_side_by_side() -> None:
    assert POOLED["a"].tolist() == [[0.0, 1.0], [5.0, 6.0]]
    assert POOLED["b"].tolist() == [[2.0, 3.0, 4.0], [7.0, 8.0, 9.0]]
    assert POOLED["b"].data_ptr() == POOLED.values[:, 2:].data_ptr()  # a view


def test_pooled_and_unpooled_features_by_name() -> None:
    rows = JaggedTensor(values=torch.ones(3, 4), lengths=torch.tensor([1, 2]))
    out = Embeddings(pooled=POOLED, rows={"history": rows})
    assert out["history"] is rows and torch.equal(out["a"], POOLED["a"])
    with pytest.raises(MesetaError, match="no feature 'histroy'; did you mean 'history'"):
        out["histroy"]
    with pytest.raises(MesetaError, match="no key 'c'; available: a, b"):
        POOLED["c"]
