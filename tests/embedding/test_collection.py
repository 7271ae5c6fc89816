"""Tests of EmbeddingBagCollection against nn.EmbeddingBag, nn.Embedding and torch.optim over several steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meseta.embedding import EmbeddingBagCollection
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import FeatureSpec, InitSpec, OptimizerSpec, TableSpec

ROWS = {"item": 13, "user": 5, "one": 1}
DIMS = {"item": 20, "user": 7, "one": 16}
FEATURES = [
    FeatureSpec(name="clicked", table="item", pooling="sum"),
    FeatureSpec(name="shown", table="item", pooling="mean"),
    FeatureSpec(name="liked", table="item", pooling="sum", weighted=True),
    FeatureSpec(name="rated", table="user", pooling="mean", weighted=True),
    FeatureSpec(name="history", table="item", pooling="none"),
    FeatureSpec(name="constant", table="one", pooling="sum"),
    FeatureSpec(name="follows", table="user", pooling="none"),
]


def tables(optimizer: OptimizerSpec, dtype: str = "float64") -> list[TableSpec]:
    return [
        TableSpec(name=name, num_embeddings=rows, embedding_dim=DIMS[name], dtype=dtype, optimizer=optimizer)
        for name, rows in ROWS.items()
    ]


def batch(step: int, num_samples: int = 9, *, every_row: bool = False) -> KeyedJaggedTensor:
    """Return random bags, some empty. `every_row` adds a bag with all rows of the table to the first sample."""
    random = np.random.default_rng(step)
    values, lengths = [], []
    for feature in FEATURES:
        length = random.integers(0, 5, num_samples)
        rows = ROWS[feature.table]
        ids = random.integers(0, rows, length.sum())
        if every_row and num_samples:
            length[0] += rows
            ids = np.concatenate([np.arange(rows), ids])
        values.append(ids)
        lengths.append(length)
    ids = torch.from_numpy(np.concatenate(values))
    return KeyedJaggedTensor(
        keys=tuple(feature.name for feature in FEATURES),
        values=ids,
        lengths=torch.from_numpy(np.concatenate(lengths)),
        weights=torch.from_numpy(random.normal(size=ids.numel())),
    )


class Plain(nn.Module):
    """The collection built of torch's modules. Only the initial rows come from this package."""

    def __init__(self, ours: EmbeddingBagCollection) -> None:
        super().__init__()
        self.weight = nn.ParameterDict({s.spec.name: nn.Parameter(s.weight.clone()) for s in ours.shards})

    def forward(self, kjt: KeyedJaggedTensor) -> dict[str, Tensor]:
        out = {}
        for feature in FEATURES:
            jagged, weight = kjt[feature.name], self.weight[feature.table]
            if feature.pooling == "none":
                out[feature.name] = nn.functional.embedding(jagged.values, weight)
                continue
            scale = jagged.weights if feature.weighted else None
            pooled = nn.functional.embedding_bag(
                jagged.values, weight, jagged.offsets, mode="sum", include_last_offset=True, per_sample_weights=scale
            )
            if feature.pooling == "mean":
                pooled = pooled / jagged.lengths.clamp(min=1)[:, None]
            out[feature.name] = pooled
        return out


def loss_of(out: Any, seed: int) -> Tensor:
    """Return a nonlinear function of every output with a different weight in each cell."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for feature in FEATURES:
        value = out[feature.name]
        value = value.values if isinstance(value, JaggedTensor) else value
        target = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        total = total + ((value - target) ** 2).sum() / 10
    return total


def make(optimizer: OptimizerSpec, dtype: str = "float64") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables(optimizer, dtype), FEATURES, seed=4)


def weights(collection: EmbeddingBagCollection) -> dict[str, Tensor]:
    return {shard.spec.name: shard.weight for shard in collection.shards}


def check_against(
    plain: Plain, optimizer: torch.optim.Optimizer, ours: EmbeddingBagCollection, every_row: bool
) -> None:
    for step in range(8):
        kjt = batch(step, every_row=every_row)
        optimizer.zero_grad()
        expected, got = plain(kjt), ours(kjt)
        for feature in FEATURES:
            value = got[feature.name]
            value = value.values if isinstance(value, JaggedTensor) else value
            torch.testing.assert_close(value, expected[feature.name], rtol=0.0, atol=1e-10)
        expected_loss, loss = loss_of(expected, step), loss_of(got, step)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0.0)
        expected_loss.backward()
        optimizer.step()
        loss.backward()
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, plain.weight[name].detach(), rtol=0.0, atol=1e-10)


def test_sgd_equals_torch_on_any_rows() -> None:
    ours = make(OptimizerSpec(name="sgd", lr=0.05))
    plain = Plain(ours)
    check_against(plain, torch.optim.SGD(plain.parameters(), lr=0.05), ours, every_row=False)


def test_adagrad_equals_torch_on_any_rows() -> None:
    # Dense Adagrad leaves rows without gradient where they are, as the lazy one does.
    ours = make(OptimizerSpec(name="adagrad", lr=0.05, eps=1e-6, initial_accumulator=0.1))
    plain = Plain(ours)
    torch_optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.05, eps=1e-6, initial_accumulator_value=0.1)
    check_against(plain, torch_optimizer, ours, every_row=False)


def test_adam_equals_torch_where_every_row_is_touched() -> None:
    ours = make(OptimizerSpec(name="adam", lr=0.05, eps=1e-6, beta1=0.8, beta2=0.9))
    plain = Plain(ours)
    check_against(
        plain, torch.optim.Adam(plain.parameters(), lr=0.05, eps=1e-6, betas=(0.8, 0.9)), ours, every_row=True
    )


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_every_row_is_updated_if_requested(name: str) -> None:
    # As torch steps a dense table, including rows that no bag reads, whose decay and moments continue.
    constants = {"momentum": 0.9} if name == "sgd" else {"eps": 1e-6}
    ours = make(OptimizerSpec(name=name, lr=0.05, weight_decay=0.2, stepped_rows="all", **constants))  # type: ignore[arg-type]
    plain = Plain(ours)
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[name]
    torch_optimizer = kind(plain.parameters(), lr=0.05, weight_decay=0.2, **constants)  # type: ignore[operator]
    check_against(plain, torch_optimizer, ours, every_row=False)


def test_an_absolute_penalty_pulls_touched_rows_or_all() -> None:
    for rows, penalised in (("touched", [0, 4]), ("all", [0, 1, 2, 3, 4])):
        spec = OptimizerSpec(name="sgd", lr=0.5, l1=0.25, stepped_rows=rows)  # type: ignore[arg-type]
        table = TableSpec(name="t", num_embeddings=5, embedding_dim=3, dtype="float64", optimizer=spec)
        ours = EmbeddingBagCollection([table], [FeatureSpec(name="f", table="t")], seed=2)
        before = ours.shards[0].weight.clone()
        (0.0 * ours(KeyedJaggedTensor.from_lists({"f": [[0], [4, 0]]})).pooled.values).sum().backward()
        expected = before.clone()
        expected[penalised] -= 0.5 * 0.25 * before[penalised].sign()
        torch.testing.assert_close(ours.shards[0].weight, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_penalties_of_each_lookup_are_those_of_a_loss_that_has_them(name: str, clip: float | None) -> None:
    """Compares with autograd of the loss plus l2 / 2 * |row|^2 + l1 * (sum of |row|) for each id of each bag."""
    l2, l1 = 0.04, 0.02
    spec = OptimizerSpec(name=name, lr=0.05, weight_decay=l2, l1=l1, stepped_rows="looked_up", clip_value=clip)
    ours = make(spec)
    plain = Plain(ours)
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[name]
    torch_optimizer = kind(plain.parameters(), lr=0.05, **({} if name == "sgd" else {"eps": 1e-8}))  # type: ignore[operator]
    for step in range(8):
        kjt = batch(step)
        loss = loss_of(plain(kjt), step)
        for feature in FEATURES:
            rows = plain.weight[feature.table][kjt[feature.name].values]
            loss = loss + l2 / 2 * (rows**2).sum() + l1 * rows.abs().sum()
        torch_optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_value_(plain.parameters(), clip)
        torch_optimizer.step()
        loss_of(ours(kjt), step).backward()
        for table, weight in weights(ours).items():
            torch.testing.assert_close(weight, plain.weight[table].detach(), rtol=0, atol=1e-12)


class RowwiseAdagrad(torch.optim.Optimizer):
    """The formula of arXiv 2104.05158 on a dense gradient."""

    def __init__(self, parameters: Any, lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros(p.shape[0], dtype=p.dtype))
                total += (p.grad**2).mean(1)
                touched = (p.grad != 0).any(1)
                p[touched] -= group["lr"] * p.grad[touched] / (total[touched].sqrt() + group["eps"])[:, None]


def test_rowwise_adagrad_equals_the_formula() -> None:
    ours = make(OptimizerSpec(name="rowwise_adagrad", lr=0.05, eps=1e-6))
    plain = Plain(ours)
    check_against(plain, RowwiseAdagrad(plain.parameters(), 0.05, 1e-6), ours, every_row=False)


OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_untouched_rows_and_their_state_are_unchanged(name: str) -> None:
    ours = make(OptimizerSpec(name=name, lr=0.05), "float32")
    for step in range(3):
        loss_of(ours(batch(step)), step).backward()
    before = copy.deepcopy(ours.shards)
    kjt = batch(3, num_samples=2)
    loss_of(ours(kjt), 3).backward()
    for old, new in zip(before, ours.shards, strict=True):
        reads = [kjt[f.name].values for f in FEATURES if f.table == new.spec.name]
        touched = torch.zeros(new.spec.num_embeddings, dtype=torch.bool).index_fill_(0, torch.cat(reads), True)
        assert not touched.all() or new.spec.name != "item"
        for a, b in [(old.weight, new.weight), *((old.state[n], new.state[n]) for n in old.state)]:
            assert torch.equal(a[~touched], b[~touched])
            assert not touched.any() or not torch.equal(a[touched], b[touched])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_bits_for_any_number_of_threads(name: str) -> None:
    def run(num_threads: int) -> dict[str, Tensor]:
        torch.set_num_threads(num_threads)
        try:
            ours = make(OptimizerSpec(name=name, lr=0.05), "float32")
            for step in range(2):
                loss_of(ours(batch(step, 3000)), step).backward()
            return weights(ours)
        finally:
            torch.set_num_threads(1)

    one, two = run(1), run(2)
    assert all(torch.equal(one[table], two[table]) for table in one)


def test_other_keys_and_another_order_change_nothing() -> None:
    ours, other = make(OptimizerSpec(lr=0.05)), make(OptimizerSpec(lr=0.05))
    kjt = batch(0)
    names = ["follows", "shown", "clicked", "constant", "history", "rated", "liked"]
    mixed = kjt.select(names)
    extra = KeyedJaggedTensor(
        keys=("other", *mixed.keys),
        values=torch.cat([torch.tensor([10**9]), mixed.values]),
        lengths=torch.cat([torch.tensor([1] + [0] * 8), mixed.lengths]),
        weights=None
        if mixed.weights is None
        else torch.cat([torch.tensor([torch.nan], dtype=torch.float64), mixed.weights]),
    )
    a, b = ours(kjt), other(extra)
    assert a.pooled.keys == b.pooled.keys == ("clicked", "shown", "liked", "rated", "constant")
    assert a.pooled.dims == (20, 20, 20, 7, 16)
    assert torch.equal(a.pooled.values, b.pooled.values)
    for out in (a, b):
        loss_of(out, 0).backward()
    assert all(torch.equal(weights(ours)[t], weights(other)[t]) for t in ROWS)


def test_pooled_values_are_the_features_side_by_side() -> None:
    out = make(OptimizerSpec())(batch(0))
    parts = [out[feature.name] for feature in FEATURES if feature.pooling != "none"]
    assert torch.equal(out.pooled.values, torch.cat(parts, dim=1))
    history = out["history"]
    assert isinstance(history, JaggedTensor)
    assert torch.equal(history.lengths, batch(0)["history"].lengths)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_int32_ids_and_lengths(dtype: torch.dtype) -> None:
    ours, other = make(OptimizerSpec(lr=0.05)), make(OptimizerSpec(lr=0.05))
    kjt = batch(0)
    narrow = KeyedJaggedTensor(
        keys=kjt.keys, values=kjt.values.int(), lengths=kjt.lengths.to(dtype), weights=kjt.weights
    )
    for collection, ids in ((ours, kjt), (other, narrow)):
        loss_of(collection(ids), 0).backward()
    assert all(torch.equal(weights(ours)[t], weights(other)[t]) for t in ROWS)


def test_empty_batch_and_batch_without_ids() -> None:
    ours = make(OptimizerSpec(name="adam"), "float32")
    before = {t: w.clone() for t, w in weights(ours).items()}
    for num_samples in (0, 4):
        empty = KeyedJaggedTensor(
            keys=tuple(f.name for f in FEATURES),
            values=torch.empty(0, dtype=torch.int64),
            lengths=torch.zeros(num_samples * len(FEATURES), dtype=torch.int64),
            weights=torch.empty(0),
        )
        out = ours(empty)
        assert torch.equal(out.pooled.values, torch.zeros(num_samples, 83))
        assert out["history"].values.shape == (0, 20)
        loss_of(out, 0).backward()
    assert ours.step == 2
    assert all(torch.equal(before[t], weights(ours)[t]) for t in ROWS)


def test_only_unpooled_features() -> None:
    table = TableSpec(name="t", num_embeddings=4, embedding_dim=3, init=InitSpec(kind="constant", scale=1.0))
    ours = EmbeddingBagCollection([table], [FeatureSpec(name="f", table="t", pooling="none")])
    out = ours(KeyedJaggedTensor.from_lists({"f": [[0, 2], []]}))
    assert out.pooled.values.shape == (2, 0) and out["f"].values.shape == (2, 3)
    out["f"].values.sum().backward()
    assert (weights(ours)["t"] != 1.0).any(1).tolist() == [True, False, True, False]


def test_a_table_that_no_feature_reads() -> None:
    specs = [TableSpec(name=n, num_embeddings=4, embedding_dim=3) for n in ("read", "unread")]
    ours = EmbeddingBagCollection(specs, [FeatureSpec(name="f", table="read")])
    before = weights(ours)["unread"].clone()
    ours(KeyedJaggedTensor.from_lists({"f": [[0], [1]]})).pooled.values.sum().backward()
    assert torch.equal(weights(ours)["unread"], before)


def test_no_memory_before_the_first_use() -> None:
    # 40 TB, so that any access fails.
    huge = TableSpec(name="huge", num_embeddings=10**11, embedding_dim=100)
    collection = EmbeddingBagCollection([huge], [FeatureSpec(name="f", table="huge")])
    assert "shards" not in vars(collection)
    assert not list(collection.parameters())
    repr(collection), copy.deepcopy(collection), collection.train(), collection.eval()
    assert collection.plan["huge"].shards[0].num_rows == 10**11


def test_no_grad_reads_without_learning() -> None:
    ours = make(OptimizerSpec(lr=0.5))
    before = {t: w.clone() for t, w in weights(ours).items()}
    with torch.no_grad():
        out = ours(batch(0))
    assert not out.pooled.values.requires_grad and ours.step == 0
    assert all(torch.equal(before[t], weights(ours)[t]) for t in ROWS)


def test_inference_mode_first_and_training_after() -> None:
    ours, other = make(OptimizerSpec(lr=0.5)), make(OptimizerSpec(lr=0.5))
    with torch.inference_mode():
        ours(batch(0))  # takes the memory
    for collection in (ours, other):
        loss_of(collection(batch(1)), 1).backward()
    assert all(torch.equal(weights(ours)[t], weights(other)[t]) for t in ROWS)
    with torch.inference_mode():
        ours(batch(2))


def test_two_forwards_before_one_backward() -> None:
    """Both forward passes looked up the same rows. Each takes a separate optimizer step, the later one first."""
    ours, other = make(OptimizerSpec(name="sgd", lr=0.5)), make(OptimizerSpec(name="sgd", lr=0.5))
    a, b = ours(batch(0)), ours(batch(1))
    (loss_of(a, 0) + loss_of(b, 1)).backward()
    assert ours.step == 2
    # With SGD the two steps add up to one step of the added gradients.
    plain = Plain(other)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    (loss_of(plain(batch(0)), 0) + loss_of(plain(batch(1)), 1)).backward()
    optimizer.step()
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, plain.weight[name].detach(), rtol=0.0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_backward_that_keeps_its_own_graph() -> None:
    ours, other = make(OptimizerSpec(lr=0.5)), make(OptimizerSpec(lr=0.5))
    for collection, keep in ((ours, False), (other, True)):
        head = nn.Linear(83, 1).double()
        nn.init.ones_(head.weight)
        nn.init.zeros_(head.bias)
        values = head(collection(batch(0)).pooled.values).square().sum()
        values.backward(create_graph=keep)
    assert all(torch.equal(weights(ours)[t], weights(other)[t]) for t in ROWS)
    assert not any(w.requires_grad for w in weights(other).values())


def test_outputs_keep_their_values_while_rows_learn() -> None:
    ours = make(OptimizerSpec(lr=0.5))
    out = ours(batch(0))
    kept = out.pooled.values.detach().clone()
    loss_of(out, 0).backward()
    assert torch.equal(out.pooled.values, kept)


def test_lr_factor_multiplies_the_learning_rate() -> None:
    ours, other = make(OptimizerSpec(name="sgd", lr=0.5)), make(OptimizerSpec(name="sgd", lr=0.125))
    ours.lr_factor = 0.25
    for collection in (ours, other):
        loss_of(collection(batch(0)), 0).backward()
    assert all(torch.equal(weights(ours)[t], weights(other)[t]) for t in ROWS)


def test_seed_decides_the_initial_rows() -> None:
    first = {t: w.clone() for t, w in weights(make(OptimizerSpec())).items()}
    again = weights(make(OptimizerSpec()))
    other = weights(EmbeddingBagCollection(tables(OptimizerSpec()), FEATURES, seed=5))
    assert all(torch.equal(first[t], again[t]) and not torch.equal(first[t], other[t]) for t in ROWS)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_ids_get_the_gradient_that_torch_gives(dtype: str) -> None:
    ours = EmbeddingBagCollection(tables(OptimizerSpec(name="sgd", lr=0.1), dtype), FEATURES)
    ids = batch(3)
    weights = torch.rand(ids.values.numel(), dtype=ours.dtype, requires_grad=True)
    weighted_ids = KeyedJaggedTensor(keys=ids.keys, values=ids.values, lengths=ids.lengths, weights=weights)
    rows = {shard.spec.name: shard.weight.clone() for shard in ours.shards}
    out = ours(weighted_ids)
    upstream = torch.randn(out.pooled.values.shape, dtype=ours.dtype)
    (out.pooled.values * upstream).sum().backward()
    expected = torch.zeros_like(weights)
    column = 0
    for feature in ours.groups[0].pooled_features:
        width, feature_ids = DIMS[feature.table], weighted_ids[feature.name]
        start = weighted_ids.key_offsets[weighted_ids.keys.index(feature.name)]
        for sample, bag in enumerate(feature_ids.lengths.split(1)):
            count = int(bag)
            taken = range(int(feature_ids.lengths[:sample].sum()), int(feature_ids.lengths[:sample].sum()) + count)
            for at in taken if feature.weighted else ():
                gradient = upstream[sample, column : column + width] / (count if feature.pooling == "mean" else 1)
                expected[start + at] = (rows[feature.table][feature_ids.values[at]] * gradient).sum()
        column += width
    assert weights.grad is not None and expected.count_nonzero() > 5
    torch.testing.assert_close(weights.grad, expected)
