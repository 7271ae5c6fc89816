"""Loss terms of a model have the gradients of plain torch, and invalid terms are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, TableSpec
from own_models import GlobalLoss, TwoBlocks

IDS = [[0, 4], [], [4], [1], [2, 2]]


def made(labels: tuple[str, ...] = ("label",), cls: Any = TwoBlocks) -> Any:
    sgd = OptimizerSpec(name="sgd", lr=0.5)
    tables = [TableSpec(name="item", num_embeddings=5, embedding_dim=3, dtype="float64", optimizer=sgd)]
    embeddings = EmbeddingBagCollection(tables, [FeatureSpec(name="seen", table="item")])
    torch.manual_seed(3)
    return cls(embeddings, num_dense=2, labels=labels, seed=0).double()


def batch(num_tasks: int = 1, weight: list[float] | None = None) -> Batch:
    torch.manual_seed(4)
    label = (torch.rand(5, num_tasks) > 0.5).float()
    return Batch(
        dense=torch.rand(5, 2),
        sparse=KeyedJaggedTensor.from_lists({"seen": IDS}),
        label=label.squeeze(1) if num_tasks == 1 else label,
        weight=None if weight is None else torch.tensor(weight),
    )


@pytest.mark.parametrize("accumulate_steps", [1, 3])
@pytest.mark.parametrize("weight", [None, [0.5, 3.0, 0.0, 1.0, 2.0]])
@pytest.mark.parametrize("task_weights", [None, [0.25, 3.0]])
def test_gradients_are_those_of_the_whole_sum(
    task_weights: list[float] | None, weight: list[float] | None, accumulate_steps: int
) -> None:
    num_tasks = 1 if task_weights is None else 2
    model, data = made(("a", "b")[:num_tasks]), batch(num_tasks, weight)
    table, dense = model.embeddings.shards[0].weight.clone().requires_grad_(), list(model.parameters())
    pooled = torch.stack([table[ids].sum(0) for ids in IDS])
    blocks = [functional.linear(torch.cat([data.dense.double(), pooled], 1), b.weight, b.bias) for b in model.blocks]
    mean = (blocks[0] + blocks[1]) / 2

    def of_sample(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = -(target * functional.logsigmoid(logits) + (1 - target) * functional.logsigmoid(-logits))
        return (each * torch.tensor(task_weights or [1.0]).double()).sum(1)

    w = torch.tensor(weight or [1.0] * 5).double()
    label = data.label.double().view(5, num_tasks)
    terms = [(w * of_sample(block, mean.detach().sigmoid())).sum() / w.sum() for block in blocks]
    loss = (w * of_sample(mean, label)).sum() / w.sum() + terms[0] + terms[1]
    gradients = torch.autograd.grad(loss, [*dense, table])
    expected = [value.detach() - 0.5 * g for value, g in zip([*dense, table], gradients, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = Pipeline(model, optimizer, World.single(), task_weights=task_weights, accumulate_steps=accumulate_steps)(
        data, votes=(2.0,)
    )
    assert step.loss == pytest.approx(float(loss.detach()), rel=1e-12) and step.votes == (2.0,)
    assert step.agreement.terms == pytest.approx({"first": terms[0].item(), "second": terms[1].item()}, rel=1e-12)
    torch.testing.assert_close(step.logits.view(5, -1), mean.detach(), rtol=0, atol=1e-12)
    for got, want in zip([*dense, model.embeddings.shards[0].weight], expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-12)


class Alone(TwoBlocks):
    """Model with a squared loss, whose name replaces the cross-entropy."""

    loss_terms = ("cross_entropy",)

    def score_with_losses(self, dense: Any, pooled: Any, label: Any) -> Any:
        logits = self.score(dense, pooled)
        return logits, {"cross_entropy": (logits - label) ** 2}


def test_a_term_named_cross_entropy_replaces_it() -> None:
    model, data = made(cls=Alone), batch()
    with torch.no_grad():
        pooled = torch.stack([model.embeddings.shards[0].weight[ids].sum(0) for ids in IDS])
        expected = float(((model.score(data.dense, pooled) - data.label) ** 2).mean())
    step = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), World.single())(data)
    assert step.loss == pytest.approx(expected, rel=1e-6) and step.agreement.terms == {"cross_entropy": step.loss}


@pytest.mark.parametrize(
    ("names", "terms", "message"),
    [
        (["first"], {}, r"Wrong.loss_terms must be a tuple of names such as \('block',\), got \['first'\]"),
        (("a", "a"), {}, "loss_terms must not contain duplicates, got a, a"),
        (("a",), {"b": torch.zeros(5)}, r"a tensor for each of the terms \['a'\], got \['b'\]"),
        (("a",), [torch.zeros(5)], "got list"),
        (
            ("a",),
            {"a": torch.zeros(())},
            r"the term 'a' has shape \[\] for logits \[5\]; return one number for each sample",
        ),
    ],
)
def test_invalid_terms_are_rejected(names: Any, terms: Any, message: str) -> None:
    class Wrong(TwoBlocks):
        loss_terms = names

        def score_with_losses(self, dense: Any, pooled: Any, label: Any) -> Any:
            return self.score(dense, pooled), terms

    with pytest.raises(MesetaError, match=message):
        Pipeline(model := made(cls=Wrong), torch.optim.SGD(model.parameters()), World.single())(batch())


def test_names_without_the_method_are_refused() -> None:
    model = made()
    model.score_with_losses = None
    with pytest.raises(MesetaError, match="TwoBlocks has loss_terms, but no method score_with_losses"):
        Pipeline(model, torch.optim.SGD(model.parameters()), World.single())


def test_samples_of_weight_0_change_nothing() -> None:
    data, models = batch(weight=[1.0, 1.0, 1.0, 0.0, 0.0]), [made(), made()]
    others = replace(data, dense=data.dense * torch.tensor([1.0, 1.0, 1.0, 7.0, 7.0])[:, None])
    for model, of_model in zip(models, (data, others), strict=True):
        Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single())(of_model)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("weight", [None, [0.5, 3.0, 0.0, 1.0, 2.0]])
def test_a_global_loss_term_is_added_to_the_mean(weight: list[float] | None) -> None:
    """Padding samples are excluded: here the last one."""
    model, data = made(cls=GlobalLoss), batch(weight=weight)
    real = replace(data, num_padding=1, weight=torch.tensor([*(weight or [1.0] * 5)[:4], 0.0]))
    table, dense = model.embeddings.shards[0].weight.clone().requires_grad_(), list(model.linear.parameters())
    pooled = torch.stack([table[ids].sum(0) for ids in IDS])
    logits = functional.linear(torch.cat([data.dense.double(), pooled], 1), *dense).squeeze(1)[:4]
    w, y = real.weight[:4].double(), data.label[:4].double()  # type: ignore[index]
    p = logits.sigmoid()
    calibration = (((p - y) * w).sum() / w.sum()) ** 2
    above = [functional.softplus(logits[j] - logits[i]) for i in range(4) for j in range(4) if y[i] > y[j]]
    pairs = torch.stack(above).sum() / 16
    loss = (w * -(y * p.log() + (1 - y) * (1 - p).log())).sum() / w.sum() + calibration + pairs
    gradients = torch.autograd.grad(loss, [*dense, table])
    expected = [value.detach() - 0.5 * g for value, g in zip([*dense, table], gradients, strict=True)]
    step = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.5), World.single())(real)
    assert step.loss == pytest.approx(loss.item(), rel=1e-12)
    assert step.agreement.terms == pytest.approx({"calibration": calibration.item(), "pairs": pairs.item()}, rel=1e-12)
    for got, want in zip([*dense, model.embeddings.shards[0].weight], expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-12)


def test_invalid_global_loss_terms_are_rejected() -> None:
    model = made(cls=GlobalLoss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(MesetaError, match=r"global_loss_terms, .* but train.accumulate_steps is 3; set"):
        Pipeline(model, optimizer, World.single(), accumulate_steps=3)
    model.global_losses = lambda logits, label, weight: {"calibration": logits, "pairs": logits.sum()}
    with pytest.raises(
        MesetaError,
        match=r"the term 'calibration' must be a scalar, got shape \[5\]; return one number for the whole batch",
    ):
        Pipeline(model, optimizer, World.single())(batch())
    model.loss_terms, model.score_with_losses = ("pairs",), None.__init__
    with pytest.raises(MesetaError, match="loss_terms and global_loss_terms must have different names"):
        Pipeline(model, optimizer, World.single())
