"""Tests that backward passes over micro-batches give the bits of one over the batch, for every row optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.data.read.batch import Batch, split_batch
from meseta.embedding import EmbeddingBagCollection
from meseta.sparse import Embeddings, KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec
from sampling import diagonal

NUM_SAMPLES = 700  # two blocks of 256 and a part of one
ROWS = {"item": 40, "user": 7}
FEATURES = [
    FeatureSpec(name="clicked", table="item"),
    FeatureSpec(name="rated", table="user", pooling="mean", weighted=True),
    FeatureSpec(name="history", table="item", pooling="none"),
    FeatureSpec(name="liked", table="item", weighted=True),
    FeatureSpec(name="follows", table="user", pooling="none"),
]
OPTIMIZERS = [
    OptimizerSpec(name="sgd", lr=0.1),
    OptimizerSpec(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=0.5),
    OptimizerSpec(name="adagrad"),
    OptimizerSpec(name="rowwise_adagrad"),
    OptimizerSpec(name="adam"),
    OptimizerSpec(name="rowwise_adam"),
    OptimizerSpec(name="lamb"),
    OptimizerSpec(name="ftrl", l1=0.1),
    OptimizerSpec(name="rmsprop"),
]


def make(optimizer: OptimizerSpec, dtype: str) -> EmbeddingBagCollection:
    tables = [
        TableSpec(name=name, num_embeddings=rows, embedding_dim=20, dtype=dtype, optimizer=optimizer)
        for name, rows in ROWS.items()
    ]
    return EmbeddingBagCollection(tables, FEATURES, seed=1)


def batch(seed: int, num_samples: int = NUM_SAMPLES) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * num_samples,), generator=draw)
    per_key = lengths.view(len(FEATURES), -1).sum(1).tolist()
    ids = torch.cat(
        [torch.randint(0, ROWS[f.table], (n,), generator=draw) for f, n in zip(FEATURES, per_key, strict=True)]
    )
    sparse = KeyedJaggedTensor(tuple(f.name for f in FEATURES), ids, lengths, torch.randn(ids.numel(), generator=draw))
    dense = torch.randn(num_samples, 60, generator=draw)  # here the upstream gradient of pooled features
    return Batch(dense=dense, sparse=sparse, label=torch.arange(float(num_samples)))


def given_loss(out: Embeddings, part: Batch) -> Tensor:
    """Return a loss whose gradient depends on the sample alone, and on the position for unpooled features."""
    total = (out.pooled.values * part.dense).sum()
    for name in ("history", "follows"):
        rows = out[name]
        scale = torch.repeat_interleave(part.label, rows.lengths)  # type: ignore[union-attr]
        total = total + (rows.values * torch.cos(scale)[:, None]).sum()  # type: ignore[union-attr]
    return total


def state_of(ours: EmbeddingBagCollection) -> list[Tensor]:
    return [tensor for shard in ours.shards for tensor in (shard.weight, *shard.state.values())]


@pytest.mark.parametrize("case", diagonal(optimizer=range(len(OPTIMIZERS)), dtype=["float32", "bfloat16"]))
def test_parts_equal_the_whole_batch_bit_for_bit(case: dict[str, Any]) -> None:
    whole, parts = (make(OPTIMIZERS[case["optimizer"]], case["dtype"]) for _ in range(2))
    for step, num_parts in enumerate((3, 2, 1, 5)):  # parts end inside blocks of 256 samples
        data = batch(step)
        given_loss(whole(data.sparse), data).backward()
        before = [tensor.clone() for tensor in state_of(parts)]
        *first, last = split_batch(data, num_parts)
        for part in first:
            with parts.accumulate_gradients():
                given_loss(parts(part.sparse), part).backward()
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(parts), strict=True))
        given_loss(parts(last.sparse), last).backward()
        assert parts.step == step + 1
        assert all(torch.equal(a, b) for a, b in zip(state_of(whole), state_of(parts), strict=True))


def test_accumulated_gradients_can_be_discarded() -> None:
    ours, plain = make(OPTIMIZERS[0], "float32"), make(OPTIMIZERS[0], "float32")
    data = batch(0)
    with ours.accumulate_gradients():
        given_loss(ours(data.sparse), data).backward()
    ours.discard_accumulated()
    for collection in (ours, plain):
        given_loss(collection(data.sparse), data).backward()
    assert all(torch.equal(a, b) for a, b in zip(state_of(ours), state_of(plain), strict=True))


@pytest.mark.parametrize("num_samples", [0, 1, 2, 7])
def test_a_batch_is_cut_into_even_parts(num_samples: int) -> None:
    data = batch(3, num_samples)
    parts = split_batch(data, 3)
    sizes = [part.batch_size for part in parts]
    assert sum(sizes) == num_samples and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes)
    assert torch.equal(torch.cat([part.dense for part in parts]), data.dense)
    assert torch.equal(torch.cat([part.label for part in parts]), data.label)
    for feature in FEATURES:
        pieces, expected = [part.sparse[feature.name] for part in parts], data.sparse[feature.name]
        assert torch.equal(torch.cat([piece.values for piece in pieces]), expected.values)
        assert torch.equal(torch.cat([piece.lengths for piece in pieces]), expected.lengths)
        assert torch.equal(torch.cat([piece.weights for piece in pieces]), expected.weights)  # type: ignore[misc,arg-type]
