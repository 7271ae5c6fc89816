"""One training step: the loss, the conditions of an update, and stage times."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.models import DLRM
from meseta.optim.dense import GradientClipper
from meseta.pipeline import Pipeline, StageTimes
from meseta.pipeline.losses import NonFiniteLoss
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, TableSpec


def make() -> tuple[Pipeline, DLRM]:
    sgd = OptimizerSpec(name="sgd", lr=0.5)
    tables = [TableSpec(name="item", num_embeddings=5, embedding_dim=3, dtype="float64", optimizer=sgd)]
    embeddings = EmbeddingBagCollection(tables, [FeatureSpec(name="seen", table="item")])
    model = DLRM(embeddings, num_dense=2, bottom_mlp=(3,), top_mlp=(4,)).double()
    step = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single())
    return step, model


def batch(dense: list[list[float]] | None = None, ids: list[list[int]] | None = None) -> Batch:
    return Batch(
        dense=torch.tensor(dense or [[0.5, -1.0], [2.0, 0.0], [0.1, 0.2]]),
        sparse=KeyedJaggedTensor.from_lists({"seen": ids or [[0, 4], [], [4]]}),
        label=torch.tensor([1.0, 0.0, 1.0]),
    )


def state(model: DLRM) -> list[torch.Tensor]:
    return [copy.deepcopy(p.detach()) for p in model.parameters()] + [model.embeddings.shards[0].weight.clone()]  # type: ignore[union-attr]


def test_a_step_equals_plain_torch() -> None:
    step, model = make()
    dense, table, data = list(model.parameters()), model.embeddings.shards[0].weight.clone(), batch()  # type: ignore[union-attr]
    table.requires_grad_()
    pooled = torch.stack([table[[0, 4]].sum(0), torch.zeros(3).double(), table[4]])
    logits = model.score(data.dense.double(), pooled)
    loss = functional.binary_cross_entropy_with_logits(logits, data.label.double())
    gradients = torch.autograd.grad(loss, [*dense, table])
    expected = [value.detach() - 0.5 * g for value, g in zip([*dense, table], gradients, strict=True)]
    result = step(data)
    assert result.num_samples == 3 and result.loss == pytest.approx(float(loss.detach()), abs=1e-12)
    torch.testing.assert_close(result.logits, logits.detach())
    for got, want in zip(state(model), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_votes_travel_with_the_loss() -> None:
    step, _ = make()
    assert step(batch()).votes == ()
    assert step(batch(), votes=(1.0, 0.25)).votes == (1.0, 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e39])
def test_a_non_finite_loss_updates_nothing(value: float) -> None:
    step, model = make()
    before = state(model)
    with pytest.raises(NonFiniteLoss, match="nothing was updated"):
        step(batch(dense=[[0.5, -1.0], [value, 0.0], [0.1, 0.2]]))
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert model.embeddings.step == 0
    step(batch())
    assert model.embeddings.step == 1


def test_a_refused_id_updates_nothing() -> None:
    step, model = make()
    before = state(model)
    with pytest.raises(MesetaError, match="id 5 from feature 'seen', sample 1"):
        step(batch(ids=[[0], [5], []]))
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


class TwoTasks(torch.nn.Module):
    """A linear layer per task over dense inputs and pooled embeddings."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        sgd = OptimizerSpec(name="sgd", lr=0.5)
        tables = [TableSpec(name="item", num_embeddings=5, embedding_dim=3, dtype="float64", optimizer=sgd)]
        self.embeddings = EmbeddingBagCollection(tables, [FeatureSpec(name="seen", table="item")])
        torch.manual_seed(1)
        self.head = torch.nn.Linear(5, num_tasks).double()

    def score(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.cat([dense.double(), pooled], dim=1))
        return logits.squeeze(1) if logits.shape[1] == 1 else logits


def example(num_tasks: int, weight: list[float] | None) -> Batch:
    one = batch()
    label = torch.tensor([[1.0, 0.0], [0.0, 0.25], [1.0, 1.0]])
    label = label[:, 0] if num_tasks == 1 else label
    return replace(one, label=label, weight=None if weight is None else torch.tensor(weight))


@pytest.mark.parametrize("weight", [None, [0.5, 3.0, 0.0], [1e-3, 1e-3, 1e-3]])
@pytest.mark.parametrize(("num_tasks", "task_weights"), [(1, None), (1, [2.5]), (2, None), (2, [0.25, 3.0])])
def test_the_loss_of_weighted_samples_and_several_tasks(
    num_tasks: int, task_weights: list[float] | None, weight: list[float] | None
) -> None:
    model, data = TwoTasks(num_tasks), example(num_tasks, weight)
    step = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single(), task_weights=task_weights)
    table, dense = model.embeddings.shards[0].weight.clone().requires_grad_(), list(model.parameters())
    pooled = torch.stack([table[[0, 4]].sum(0), torch.zeros(3).double(), table[4]])
    logits = model.score(data.dense, pooled)
    # The weighted mean, written out with the probabilities.
    p, y = torch.sigmoid(logits), data.label.double()
    each = -(y * p.log() + (1 - y) * (1 - p).log()).reshape(3, num_tasks)
    per_sample = (each * torch.tensor(task_weights or [1.0] * num_tasks)).sum(1)
    w = torch.tensor(weight or [1.0] * 3).double()
    loss = (w * per_sample).sum() / w.sum()
    gradients = torch.autograd.grad(loss, [*dense, table])
    expected = [value.detach() - 0.5 * g for value, g in zip([*dense, table], gradients, strict=True)]
    result = step(data)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-12) and result.num_samples == 3
    assert torch.equal(result.logits, logits.detach())
    for got, want in zip([*dense, model.embeddings.shards[0].weight], expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-12)


def test_only_the_dense_gradients_are_clipped() -> None:
    models = [TwoTasks(2), TwoTasks(2)]
    before = [p.detach().clone() for p in models[0].parameters()]
    for model, clip in zip(models, (None, GradientClipper(norm=0.01)), strict=True):
        Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single(), clip=clip)(example(2, None))
    moved = [
        torch.cat([(p.detach() - old).flatten() for p, old in zip(m.parameters(), before, strict=True)]) for m in models
    ]
    assert float(moved[1].norm()) == pytest.approx(0.5 * 0.01, rel=1e-3)
    torch.testing.assert_close(moved[1] / moved[1].norm(), moved[0] / moved[0].norm())
    assert torch.equal(models[0].embeddings.shards[0].weight, models[1].embeddings.shards[0].weight)


def test_a_batch_of_weight_zero_changes_nothing() -> None:
    model = TwoTasks(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    step = Pipeline(model, optimizer, World.single())
    before = [p.detach().clone() for p in model.parameters()] + [model.embeddings.shards[0].weight.clone()]
    result = step(example(2, [0.0, 0.0, 0.0]))
    assert result.loss == 0.0 and result.num_samples == 3 and result.logits.shape == (3, 2)
    after = [*model.parameters(), model.embeddings.shards[0].weight]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.embeddings.step == 0 and not optimizer.state
    with pytest.raises(NonFiniteLoss):
        step(replace(example(2, [0.0, 0.0, 0.0]), weight=torch.tensor([0.0, float("nan"), 1.0])))
    step(example(2, [0.0, 1.0, 0.0]))
    assert model.embeddings.step == 1


def test_a_model_with_other_outputs_than_labels_raises() -> None:
    model = TwoTasks(2)
    step = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single())
    with pytest.raises(MesetaError, match=r"logits \[3, 2\] for labels \[3\]"):
        step(example(1, None))


def test_times_are_means_per_step_and_are_reset() -> None:
    step, _ = make()
    step(batch())
    step(batch())
    times = step.stage_times.pop_means()
    assert set(times) == {
        "data",
        "copy",
        "input_dist",
        "lookup",
        "dense_forward",
        "agree",
        "backward",
        "table_update",
        "dense_update",
    }
    assert all(seconds > 0 for seconds in times.values())
    assert step.stage_times.pop_means() == {}


def test_a_repeated_stage_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 13.0, 14.0])
    monkeypatch.setattr("meseta.telemetry.span.time.perf_counter", lambda: next(clock))
    times = StageTimes()
    with times.stage("data"):
        pass
    with times.stage("data"):
        pass
    times.end_step()
    times.end_step()
    assert times.pop_means() == {"data": 1.5}


def test_a_nested_stage_is_timed_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 10.0, 11.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr("meseta.telemetry.span.time.perf_counter", lambda: next(clock))
    times = StageTimes()
    with times.stage("backward"), times.stage("table_update"):
        pass
    times.end_step()
    assert times.pop_means() == {"backward": 7.0, "table_update": 3.0}
    with times.stage("backward"):
        pass
    times.end_step()
    assert times.pop_means() == {"backward": 1.0}
    assert times.lifetime_means() == {"backward": 4.0, "table_update": 1.5}
