"""One training step: the loss, what an update needs, and where the time goes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from meseta.comm import World
from meseta.data.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.jagged import KeyedJaggedTensor
from meseta.models import DLRM
from meseta.pipeline import StageTimes, TrainStep
from meseta.pipeline.step import NonFiniteLoss
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, TableSpec


def make() -> tuple[TrainStep, DLRM]:
    sgd = OptimizerSpec(name="sgd", lr=0.5)
    tables = [TableSpec(name="item", num_embeddings=5, embedding_dim=3, dtype="float64", optimizer=sgd)]
    embeddings = EmbeddingBagCollection(tables, [FeatureSpec(name="seen", table="item")])
    model = DLRM(embeddings, num_dense=2, bottom_mlp=(3,), top_mlp=(4,)).double()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single())
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
    step.votes = (1.0, 0.25)
    assert step(batch()).votes == (1.0, 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e39])
def test_a_loss_that_is_no_number_updates_nothing(value: float) -> None:
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


def test_times_are_means_per_step_and_start_anew() -> None:
    step, _ = make()
    step(batch())
    step(batch())
    times = step.times.take()
    assert set(times) == {"copy", "input_dist", "lookup", "dense_forward", "agree", "backward", "update"}
    assert all(seconds > 0 for seconds in times.values())
    assert step.times.take() == {}


def test_a_stage_that_comes_twice_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr("meseta.pipeline.times.time.perf_counter", lambda: next(clock))
    times = StageTimes(torch.device("cpu"))
    with times.stage("data"):
        pass
    with times.stage("data"):
        pass
    times.end_step()
    times.end_step()
    assert times.take() == {"data": 1.5}
