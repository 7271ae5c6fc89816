"""One gradient norm over layers and tables, against torch's own modules, optimizers and clip_grad_norm_."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.optim.dense import GradientClipper
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, TableSpec
from sampling import product, sample

ROWS = {"item": 11, "user": 5}
FEATURES = {"clicked": ("item", "sum"), "shown": ("item", "mean"), "who": ("user", "sum")}
DIM, NUM_SAMPLES, NUM_STEPS, LIMIT = 6, 14, 20, 0.45


class Net(nn.Module):
    """A layer before the embeddings, whose gradient comes last in a backward pass, and two after them."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.bottom, self.hidden, self.head = nn.Linear(3, 4), nn.Linear(4 + 3 * DIM, 8), nn.Linear(8, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.5)
        self.double()

    def score(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([torch.tanh(self.bottom(dense.double())), pooled], dim=1)
        logits: Tensor = self.head(torch.tanh(self.hidden(x))).squeeze(1)
        return logits


class Ours(Net):
    def __init__(self, optimizers: dict[str, OptimizerSpec]) -> None:
        super().__init__()
        tables = [
            TableSpec(name=name, num_embeddings=rows, embedding_dim=DIM, dtype="float64", optimizer=optimizers[name])
            for name, rows in ROWS.items()
        ]
        features = [FeatureSpec(name=n, table=t, pooling=p) for n, (t, p) in FEATURES.items()]  # type: ignore[arg-type]
        self.embeddings = EmbeddingBagCollection(tables, features, seed=2)


class Plain(Net):
    """The model with torch's modules alone."""

    def __init__(self, ours: Ours) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(ROWS[FEATURES[name][0]], DIM, mode=FEATURES[name][1], include_last_offset=True)
                for name in FEATURES
            }
        ).double()
        for name, (table, _) in FEATURES.items():
            [shard] = [shard for shard in ours.embeddings.shards if shard.spec.name == table]
            self.tables[name].weight = nn.Parameter(shard.weight.clone())
        self.tables["shown"].weight = self.tables["clicked"].weight  # one table, read by two features

    def pooled(self, sparse: KeyedJaggedTensor) -> Tensor:
        return torch.cat([self.tables[n](sparse[n].values, sparse[n].offsets) for n in FEATURES], dim=1)

    def forward(self, data: Batch) -> Tensor:
        return self.score(data.dense, self.pooled(data.sparse))


def batch(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES), NUM_SAMPLES), generator=draw)
    ids = [
        torch.randint(0, ROWS[table], (int(bags.sum()),), generator=draw)
        for (table, _), bags in zip(FEATURES.values(), lengths, strict=True)
    ]
    return Batch(
        dense=torch.randn(NUM_SAMPLES, 3, generator=draw) * (4.0 if step % 3 else 0.3),
        sparse=KeyedJaggedTensor(tuple(FEATURES), torch.cat(ids), lengths.flatten()),
        label=torch.randint(0, 2, (NUM_SAMPLES,), generator=draw).float(),
    )


def pipeline(ours: Ours, optimizer: torch.optim.Optimizer, **options: Any) -> Pipeline:
    return Pipeline(ours, optimizer, World.single(), clip=GradientClipper(norm=LIMIT, includes_rows=True), **options)


def loss_of(logits: Tensor, data: Batch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, data.label.double())


def assert_same(ours: Ours, plain: Plain) -> None:
    for (name, parameter), expected in zip(Net.named_parameters(ours), Net.parameters(plain), strict=False):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12, msg=name)
    for shard in ours.embeddings.shards:
        name = "clicked" if shard.spec.name == "item" else "who"
        torch.testing.assert_close(shard.weight, plain.tables[name].weight.detach(), rtol=0, atol=1e-12)


KINDS: dict[str, tuple[OptimizerSpec, Any, float]] = {
    "sgd": (OptimizerSpec(name="sgd", lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3), 0.0),
    "adagrad": (OptimizerSpec(name="adagrad", lr=0.1, eps=1e-8), lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-8), 0.0),
    "adam of all rows": (
        OptimizerSpec(name="adam", lr=0.02, weight_decay=0.05, stepped_rows="all"),
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.05),
        0.0,
    ),
    "penalty of lookups": (
        OptimizerSpec(name="sgd", lr=0.3, weight_decay=0.04, stepped_rows="looked_up"),
        lambda p: torch.optim.SGD(p, lr=0.3),
        0.04,
    ),
}


@pytest.mark.parametrize("case", sample(product(kind=list(KINDS), accumulate_steps=[1, 3]), 4, seed=1))
def test_the_norm_equals_that_of_dense_gradients(case: dict[str, Any]) -> None:
    (spec, make_optimizer, l2), accumulate_steps = KINDS[case["kind"]], case["accumulate_steps"]
    ours = Ours(dict.fromkeys(ROWS, spec))
    plain = Plain(ours)
    tables = [plain.tables["clicked"].weight, plain.tables["who"].weight]
    layers = [p for name, p in plain.named_parameters() if not name.startswith("tables")]
    optimizers = [make_optimizer(tables), torch.optim.Adam(layers, lr=0.01)]
    train = pipeline(ours, torch.optim.Adam(ours.parameters(), lr=0.01), accumulate_steps=accumulate_steps)
    norms = []
    for step in range(NUM_STEPS):
        data = batch(step)
        loss = loss_of(plain(data), data)
        for name in FEATURES:
            loss = loss + l2 / 2 * (plain.tables[name].weight[data.sparse[name].values] ** 2).sum()
        plain.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)))
        for optimizer in optimizers:
            optimizer.step()
        train(data)
        assert_same(ours, plain)
    assert 3 < sum(norm > LIMIT for norm in norms) < NUM_STEPS - 3  # some are scaled, and some are not


def test_a_frozen_table_does_not_count() -> None:
    ours = Ours({"item": OptimizerSpec(name="sgd", lr=0.3), "user": OptimizerSpec(name="frozen")})
    plain = Plain(ours)
    plain.tables["who"].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.3)
    train = pipeline(ours, torch.optim.SGD(ours.parameters(), lr=0.3))
    for step in range(6):
        data = batch(step)
        optimizer.zero_grad()
        loss_of(plain(data), data).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
        optimizer.step()
        train(data)
        assert_same(ours, plain)


def test_stale_lookups_are_clipped_identically() -> None:
    """With pipeline.staleness, gradients are those of rows before the last update, and change the rows after it."""
    ours = Ours(dict.fromkeys(ROWS, OptimizerSpec(name="sgd", lr=0.3)))
    plain, former = Plain(ours), Plain(ours)
    train = pipeline(ours, torch.optim.SGD(ours.parameters(), lr=0.3))
    train.uses_stale_embeddings = True
    batches = [batch(step) for step in range(8)]
    for data, _ in zip(batches, train.steps(iter(batches)), strict=True):
        logits = plain.score(data.dense, former.pooled(data.sparse))
        layers = [p for name, p in plain.named_parameters() if not name.startswith("tables")]
        names = ("clicked", "who")
        learned = [*layers, *(former.tables[name].weight for name in names)]
        gradients = torch.autograd.grad(loss_of(logits, data), learned)
        scale = min(1.0, LIMIT / (float(torch.cat([g.flatten() for g in gradients]).norm()) + 1e-6))
        with torch.no_grad():
            for name in names:
                former.tables[name].weight.copy_(plain.tables[name].weight)
            for parameter, gradient in zip([*layers, *(plain.tables[n].weight for n in names)], gradients, strict=True):
                parameter.sub_(0.3 * scale * gradient)
        assert_same(ours, plain)


def test_non_finite_gradients_change_nothing() -> None:
    ours = Ours(dict.fromkeys(ROWS, OptimizerSpec(name="sgd", lr=0.3)))
    rows = [shard.weight.clone() for shard in ours.embeddings.shards]
    ours.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(MesetaError, match=r"^the gradients are not finite, so train.clip_norm cannot scale them;"):
        pipeline(ours, torch.optim.SGD(ours.parameters(), lr=0.3))(batch(0))
    assert all(torch.equal(a, shard.weight) for a, shard in zip(rows, ours.embeddings.shards, strict=True))


def test_no_sort_is_started_that_the_update_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sorts ids after the lookup, unless the gradients are clipped."""
    ours, clips = Ours(dict.fromkeys(ROWS, OptimizerSpec(name="sgd", lr=0.3))), list[bool]()
    monkeypatch.setattr(type(ours.embeddings), "_start_sort", lambda self, batch: clips.append(batch.clip is not None))
    pipeline(ours, torch.optim.SGD(ours.parameters(), lr=0.3))(batch(0))
    assert clips == [True]
