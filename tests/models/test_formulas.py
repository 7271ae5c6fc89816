"""Tests of FM and related models, AutoInt and MMoE against loops over the formulas of their papers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meseta.models import FM, AutoInt, DeepFM, MMoE, WideDeep, XDeepFM
from meseta.models.ranking import xdeepfm
from model_parts import OneRowEach, some_dense, some_ids

Array = np.ndarray


def random_weights(model: nn.Module) -> nn.Module:
    """Return float64 weights without zeros, which would hide errors of order."""
    model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def number(tensor: Tensor) -> Array:
    return tensor.detach().numpy()


def mlp(x: Array, stack: nn.Module, *, relu_last: bool = False) -> Array:
    layers = [layer for layer in stack.children() if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(layers):
        x = number(layer.weight) @ x + number(layer.bias)
        if relu_last or index + 1 < len(layers):
            x = np.maximum(x, 0.0)
    return x


def softmax(x: Array) -> Array:
    return np.exp(x) / np.exp(x).sum()


def samples(model: nn.Module, num_features: int, batch_size: int) -> tuple[Array, Array, Array]:
    """Return (dense [B, n], pooled [B, sum of D], outputs of the model)."""
    dense, sparse = some_dense(batch_size, 2), some_ids(num_features, batch_size)
    return number(dense), number(model.embeddings(sparse).pooled.values), number(model(dense, sparse))


def fields_of(model: FM | AutoInt | XDeepFM, x: Array, vectors: Array) -> list[Array]:
    return [*(x[j] * number(model.fields.dense_vectors)[j] for j in range(len(x))), *vectors]


def first_order(model: FM | WideDeep | XDeepFM, x: Array, rows: Array) -> float:
    linear = model.first_order.dense
    return float(number(linear.bias)[0] + number(linear.weight)[0] @ x + rows[:, -1].sum())


def fm(model: FM, x: Array, rows: Array) -> float:
    pairs = combinations(fields_of(model, x, rows[:, :-1]), 2)
    return first_order(model, x, rows) + sum(float(v @ w) for v, w in pairs)


@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_fm_is_the_sum_over_all_pairs(batch_size: int) -> None:
    model = random_weights(FM(OneRowEach([4, 4, 4]), num_dense=2))
    dense, pooled, logits = samples(model, 3, batch_size)
    expected = [fm(model, x, rows.reshape(3, 4)) for x, rows in zip(dense, pooled, strict=True)]
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


def test_fm_in_numbers() -> None:
    model = FM(OneRowEach([3, 3]), num_dense=1)
    with torch.no_grad():
        model.first_order.dense.bias.fill_(0.5)
        model.first_order.dense.weight.fill_(10.0)
        model.fields.dense_vectors.copy_(torch.tensor([[1.0, 2.0]]))
    # x = 3: v0 = (3, 6); rows (v, w): (1, 1, 100) and (2, -1, 1000); pairs 9 + 0 + 1
    logit = model.score(torch.tensor([[3.0]]), torch.tensor([[1.0, 1.0, 100.0, 2.0, -1.0, 1000.0]]))
    assert logit.tolist() == [0.5 + 30.0 + 1100.0 + 9.0 + 0.0 + 1.0]


@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_deepfm_adds_an_mlp_on_the_same_vectors(batch_size: int) -> None:
    model = random_weights(DeepFM(OneRowEach([4, 4, 4]), num_dense=2, deep_mlp=(6, 5)))
    dense, pooled, logits = samples(model, 3, batch_size)
    expected = []
    for x, flat in zip(dense, pooled, strict=True):
        rows = flat.reshape(3, 4)
        deep = mlp(np.concatenate(fields_of(model, x, rows[:, :-1])), model.deep_mlp)
        expected.append(fm(model, x, rows) + deep[0])
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_wide_deep_adds_a_line_and_an_mlp(batch_size: int) -> None:
    model = random_weights(WideDeep(OneRowEach([4, 4, 4]), num_dense=2, deep_mlp=(6, 5)))
    dense, pooled, logits = samples(model, 3, batch_size)
    expected = []
    for x, flat in zip(dense, pooled, strict=True):
        rows = flat.reshape(3, 4)
        deep = mlp(np.concatenate([x, *rows[:, :-1]]), model.deep_mlp)
        expected.append(first_order(model, x, rows) + deep[0])
    np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("batch_size", "cin_layers"),
    [(0, (3, 2)), (1, (3, 2)), (4, (3, 2)), (4, (7, 2)), (2 * xdeepfm.MIN_CHUNK_SAMPLES + 1, (3, 7))],
    ids=["no_sample", "one", "sums_first", "products_first", "some_at_a_time"],
)
def test_xdeepfm_compresses_products_of_rows(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, cin_layers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(xdeepfm, "MAX_CHUNK_ELEMENTS", 1)  # otherwise a cache holds all of these samples
    model = random_weights(XDeepFM(OneRowEach([4, 4, 4]), num_dense=2, cin_layers=cin_layers, deep_mlp=(6, 5)))
    dense, pooled, logits = samples(model, 3, batch_size)
    expected = []
    for x, flat in zip(dense, pooled, strict=True):
        rows = flat.reshape(3, 4)
        first = before = fields_of(model, x, rows[:, :-1])
        sums: list[float] = []
        for weight in model.cin.weights:
            matrices = number(weight).reshape(len(weight), len(before), len(first))
            before = [
                sum(w[i, j] * before[i] * first[j] for i in range(len(before)) for j in range(len(first)))
                for w in matrices
            ]
            sums += [float(row.sum()) for row in before]
        deep = mlp(np.concatenate(first), model.deep_mlp)
        expected.append(first_order(model, x, rows) + number(model.cin_head.weight)[0] @ np.array(sums) + deep[0])
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("num_outputs", [2, 7], ids=["sums_first", "products_first"])
def test_the_backward_pass_of_a_compressed_layer(monkeypatch: pytest.MonkeyPatch, num_outputs: int) -> None:
    """Compares with torch.autograd over the whole batch."""
    monkeypatch.setattr(xdeepfm, "MAX_CHUNK_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(5)
    shapes = (2 * xdeepfm.MIN_CHUNK_SAMPLES + 1, 3, 4), (2 * xdeepfm.MIN_CHUNK_SAMPLES + 1, 3, 5), (num_outputs, 20)
    x, first, weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes
    )
    expected = torch.einsum("bdi,bdj,oij->bdo", x, first, weight.view(num_outputs, 4, 5))
    outputs = xdeepfm.cin_layer(x, first, weight)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    weights = torch.rand(outputs.shape, dtype=torch.float64, generator=generator)
    pairs = (torch.autograd.grad(out, [x, first, weight], weights) for out in (outputs, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def interact(layer: nn.Module, fields: list[Array], num_heads: int) -> list[Array]:
    """Equations 5 to 8 of arXiv 1810.11921, head by head and field by field."""
    query, key, value = (number(part.weight) for part in (layer.query, layer.key, layer.value))
    width = len(query) // num_heads
    result = []
    for field in fields:
        heads = []
        for head in range(num_heads):
            columns = slice(head * width, (head + 1) * width)
            attention = softmax(np.array([(query[columns] @ field) @ (key[columns] @ other) for other in fields]))
            heads.append(sum(a * (value[columns] @ other) for a, other in zip(attention, fields, strict=True)))
        result.append(np.maximum(np.concatenate(heads) + number(layer.residual.weight) @ field, 0.0))
    return result


@pytest.mark.parametrize("deep_mlp", [(), (6, 5)])
@pytest.mark.parametrize("batch_size", [0, 1, 4])
def test_autoint_attends_field_by_field(batch_size: int, deep_mlp: tuple[int, ...]) -> None:
    model = random_weights(AutoInt(OneRowEach([4, 4, 4]), num_dense=2, attention=(2, 2, 3), deep_mlp=deep_mlp))
    dense, pooled, logits = samples(model, 3, batch_size)
    expected = []
    for x, flat in zip(dense, pooled, strict=True):
        fields = attended = fields_of(model, x, flat.reshape(3, 4))
        for layer in model.interacting:
            attended = interact(layer, attended, 2)
        logit = number(model.head.weight)[0] @ np.concatenate(attended) + number(model.head.bias)[0]
        expected.append(logit + (mlp(np.concatenate(fields), model.deep_mlp)[0] if deep_mlp else 0.0))
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("num_tasks", [1, 3])
@pytest.mark.parametrize("batch_size", [0, 1, 4])
def test_mmoe_mixes_experts_by_a_gate_per_task(batch_size: int, num_tasks: int) -> None:
    tables = OneRowEach([4, 3])
    model = random_weights(MMoE(tables, num_dense=2, num_tasks=num_tasks, experts=[(5,), (6, 5)], tower_mlp=(4,)))
    dense, pooled, logits = samples(model, 2, batch_size)
    expected = np.zeros((batch_size, num_tasks))
    for sample, (x, flat) in enumerate(zip(dense, pooled, strict=True)):
        inputs = np.concatenate([x, flat])
        seen = [mlp(inputs, expert, relu_last=True) for expert in model.experts]
        for task, (gate, tower) in enumerate(zip(model.gates, model.towers, strict=True)):
            share = softmax(number(gate.weight) @ inputs)
            expected[sample, task] = mlp(sum(g * f for g, f in zip(share, seen, strict=True)), tower)[0]
    np.testing.assert_allclose(logits, expected if num_tasks > 1 else expected[:, 0], rtol=1e-12, atol=1e-12)
