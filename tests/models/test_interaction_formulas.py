"""Tests of recent interaction models against loops over the formulas of their papers: outputs and all gradients.

A loop scores one sample, from its dense inputs and its pooled rows, in float64; torch differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meseta.models.interactions.deep_cross import GDCN, CrossShape, DCNv2
from meseta.models.interactions.dhen import DHEN, DHENShape
from meseta.models.interactions.final import FinalNet, FinalShape
from meseta.models.interactions.finalmlp import FinalMLP, StreamShape
from meseta.models.interactions.masknet import MaskNet, MaskShape
from meseta.models.interactions.wukong import Wukong, WukongShape
from model_parts import OneRowEach, some_dense, some_ids

Loop = Callable[[Any, Tensor, Tensor], Tensor]
BATCHES = pytest.mark.parametrize("batch_size", [0, 1, 3])


def check(model: nn.Module, loop: Loop, batch_size: int, num_dense: int = 2) -> None:
    """Check equality to 1e-10. Weights have no zeros, which would hide errors of order."""
    model.double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    num_features = len(model.embeddings.features)
    dense = some_dense(batch_size, num_dense).requires_grad_()
    pooled = model.embeddings(some_ids(num_features, batch_size)).pooled.values.detach().requires_grad_()
    parameters = {n: p for n, p in model.named_parameters() if not n.startswith("embeddings.")}
    leaves = {"pooled": pooled, **parameters} | ({"dense": dense} if num_dense else {})
    logits = model.score(dense, pooled)
    assert logits.shape == (batch_size,)
    if not batch_size:
        return
    expected = torch.stack([loop(model, x, rows) for x, rows in zip(dense, pooled, strict=True)])
    weights = torch.arange(1.0, batch_size + 1, dtype=torch.float64)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((logits * weights).sum(), list(leaves.values()))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), list(leaves.values()))
    for name, gradient, exact in zip(leaves, ours, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def mlp(x: Tensor, stack: nn.Module, *, relu_last: bool = False) -> Tensor:
    layers = [layer for layer in stack.children() if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(layers):
        x = layer.weight @ x + layer.bias
        if relu_last or index + 1 < len(layers):
            x = x.clamp(min=0.0)
    return x


def stacked(model: Any, crossed: Tensor) -> Tensor:
    return mlp(crossed, model.deep_mlp)[0]


def parallel(model: Any, crossed: Tensor, x0: Tensor) -> Tensor:
    both = torch.cat([crossed, mlp(x0, model.deep_mlp, relu_last=True)])
    return model.head.weight[0] @ both + model.head.bias[0]


def full(cross: Any, x0: Tensor) -> Tensor:
    x = x0
    for layer in cross.layers:
        x = x0 * (layer.weight @ x + layer.bias) + x
    return x


def low_rank(cross: Any, x0: Tensor) -> Tensor:
    x = x0
    for v, u in zip(cross.down, cross.up, strict=True):
        x = x0 * (u.weight @ (v.weight @ x) + u.bias) + x
    return x


def mixture(cross: Any, x0: Tensor) -> Tensor:
    """Compute equations 3 and 4 of arXiv 2008.13535, expert by expert."""
    x = x0
    for gates, down, inner, up in zip(cross.gates, cross.down, cross.inner, cross.up, strict=True):
        rank, total = len(inner[0]), x
        share = (gates.weight @ x).exp() / (gates.weight @ x).exp().sum()
        for i, c in enumerate(inner):
            columns = slice(i * rank, (i + 1) * rank)
            inside = cross.activate(c @ cross.activate(down.weight[columns] @ x))
            total = total + share[i] * (x0 * (up.weight[:, columns] @ inside + up.bias))
        x = total
    return x


CROSSES: dict[str, tuple[CrossShape, Callable[[Any, Tensor], Tensor]]] = {
    "full": (CrossShape(kind="full", num_layers=3), full),
    "low_rank": (CrossShape(kind="low_rank", num_layers=2, low_rank=3), low_rank),
    "tanh": (CrossShape(kind="mixture", num_layers=2, low_rank=2, num_experts=3), mixture),
    "relu": (CrossShape(kind="mixture", num_layers=2, low_rank=2, num_experts=2, activation="relu"), mixture),
}


@BATCHES
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
@pytest.mark.parametrize("kind", CROSSES)
def test_dcnv2(kind: str, structure: Any, batch_size: int) -> None:
    shape, cross = CROSSES[kind]

    def loop(model: DCNv2, dense: Tensor, rows: Tensor) -> Tensor:
        x0 = torch.cat([dense, rows])
        crossed = cross(model.cross, x0)
        return stacked(model, crossed) if structure == "stacked" else parallel(model, crossed, x0)

    model = DCNv2(OneRowEach([3, 4]), num_dense=2, cross=shape, structure=structure, deep_mlp=(6, 5))
    check(model, loop, batch_size)


@BATCHES
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_gdcn(structure: Any, batch_size: int) -> None:
    def loop(model: GDCN, dense: Tensor, rows: Tensor) -> Tensor:
        c = c0 = torch.cat([dense, rows])
        for layer, gate in zip(model.cross.layers, model.cross.gates, strict=True):
            c = c0 * (layer.weight @ c + layer.bias) / (1.0 + (-gate.weight @ c).exp()) + c
        return stacked(model, c) if structure == "stacked" else parallel(model, c, c0)

    model = GDCN(OneRowEach([3, 4]), num_dense=2, cross_layers=3, structure=structure, deep_mlp=(6, 5))
    check(model, loop, batch_size)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute equation 4 of arXiv 1607.06450 for one vector."""
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def field_vectors(model: Any, dense: Tensor, rows: Tensor) -> list[Tensor]:
    """Return x_j v_j of dense inputs, then the pooled rows of every feature."""
    width = model.fields.width
    return [*(x * v for x, v in zip(dense, model.fields.dense_vectors, strict=True)), *rows.split(width)]


def mask_block(block: Any, v: Tensor, x: Tensor) -> Tensor:
    inner = (block.aggregation.weight @ v + block.aggregation.bias).clamp(min=0.0)
    mask = block.projection.weight @ inner + block.projection.bias
    return norm(block.hidden.weight @ (mask * x), block.norm.weight, block.norm.bias).clamp(min=0.0)


@BATCHES
@pytest.mark.parametrize("structure", ["serial", "parallel"])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_masknet(layer_norm: bool, structure: Any, batch_size: int) -> None:
    def loop(model: MaskNet, dense: Tensor, rows: Tensor) -> Tensor:
        vectors = field_vectors(model, dense, rows)
        v = x = torch.cat(vectors)
        if layer_norm:
            x = torch.cat([norm(e, model.norm.weight[m], model.norm.bias[m]) for m, e in enumerate(vectors)])
        if structure == "parallel":
            x = torch.cat([mask_block(block, v, x) for block in model.blocks.blocks])
        else:
            for block in model.blocks.blocks:
                x = mask_block(block, v, x)
        return mlp(x, model.deep_mlp)[0]

    deep_mlp = (4,) if structure == "parallel" else ()
    make = {"shape": MaskShape(structure=structure, widths=(6, 5), reduction=0.5), "deep_mlp": deep_mlp}
    make["embedding_layer_norm"] = layer_norm
    check(MaskNet(OneRowEach([3, 3]), num_dense=2, **make), loop, batch_size)


@BATCHES
@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_finalmlp(num_heads: int, gates: bool, batch_size: int) -> None:
    def loop(model: FinalMLP, dense: Tensor, rows: Tensor) -> Tensor:
        e = torch.cat([dense, rows])
        contexts = [model.gates[0].vector, torch.cat([rows[3:7], rows[:3]])] if gates else []
        seen = [e, e]
        for s, context in enumerate(contexts):
            seen[s] = 2.0 / (1.0 + (-mlp(context, model.gates[s].mlp)).exp()) * e
        o1, o2 = (mlp(h, stream, relu_last=True) for h, stream in zip(seen, model.streams, strict=True))
        fusion = model.fusion
        logit = fusion.first.bias[0] + fusion.first.weight[0] @ o1 + fusion.second.weight[0] @ o2
        for j, w in enumerate(fusion.heads):  # [outputs of stream 2, of stream 1] of a head
            first, second = o1.chunk(num_heads)[j], o2.chunk(num_heads)[j]
            logit = logit + sum(first[m] * w[n, m] * second[n] for m in range(len(first)) for n in range(len(second)))
        return logit

    streams = (
        StreamShape(mlp=(6, 4), gate_mlp=(3,)),
        StreamShape(mlp=(5, 6), gate_mlp=(2,), context=("f1", "f0")),
    )
    make = {"streams": streams, "feature_gates": gates, "num_heads": num_heads}
    check(FinalMLP(OneRowEach([3, 4]), num_dense=2, **make), loop, batch_size)


def final_block(block: Any, x: Tensor, residual: str, relu: bool) -> Tensor:
    for layer in block.layers:
        half = len(layer.weight) // 2
        a = layer.weight[:half] @ x + layer.bias[:half]
        g = layer.weight[half:] @ x + layer.bias[half:]
        x = torch.cat([a, a * g]) if residual == "concat" else a + a * g
        x = x.clamp(min=0.0) if relu else x
    return block.head.weight[0] @ x + block.head.bias[0]


@BATCHES
@pytest.mark.parametrize("blocks", [((6, 4),), ((6, 4), (8,))])
@pytest.mark.parametrize(("residual", "gate", "relu"), [("concat", True, True), ("sum", False, False)])
def test_finalnet(residual: Any, gate: bool, relu: bool, blocks: Any, batch_size: int) -> None:
    def loop(model: FinalNet, dense: Tensor, rows: Tensor) -> Tensor:
        vectors = field_vectors(model, dense, rows)
        e = gated = torch.cat(vectors)
        if gate:
            linear = model.field_gate.gates.linear
            weights = [sum(w * v for w, v in zip(row, vectors, strict=True)) for row in linear.weight]
            gated = torch.cat([e, *(v * (w + b) for v, w, b in zip(vectors, weights, linear.bias, strict=True))])
        said = [final_block(block, x, residual, relu) for block, x in zip(model.blocks, (gated, e), strict=False)]
        return sum(said) / len(said)

    make = {"blocks": blocks, "shape": FinalShape(residual=residual, relu=relu, field_gate=gate)}
    check(FinalNet(OneRowEach([3, 3]), num_dense=2, **make), loop, batch_size)


def mix(matrix: Any, vectors: list[Tensor]) -> list[Tensor]:
    return [sum(w * x for w, x in zip(row, vectors, strict=True)) for row in matrix.linear.weight]


def first_vectors(model: Any, dense: Tensor, rows: Tensor) -> list[Tensor]:
    of_dense = [mlp(dense, model.bottom.mlp, relu_last=True)] if len(dense) else []
    return [*of_dense, *rows.split(model.width)]


def added_and_normalised(layer: Any, made: list[Tensor], before: list[Tensor], residual: Any) -> list[Tensor]:
    shortcut = before if residual is None else mix(residual, before)
    assert len(made) == len(shortcut)
    return [norm(y + x, layer.norm.weight, layer.norm.bias) for y, x in zip(made, shortcut, strict=True)]


@BATCHES
@pytest.mark.parametrize("num_dense", [0, 2])
def test_wukong(num_dense: int, batch_size: int) -> None:
    def loop(model: Wukong, dense: Tensor, rows: Tensor) -> Tensor:
        vectors = first_vectors(model, dense, rows)
        for layer in model.layers:
            block, x = layer.fm_block, torch.stack(vectors)
            products = (x @ x.T) @ block.projection.linear.weight.T  # X X^T Y
            flat = norm(products.flatten(), block.norm.weight, block.norm.bias)
            made = [*mlp(flat, block.mlp).split(3), *mix(layer.linear_block, vectors)]
            vectors = added_and_normalised(layer, made, vectors, layer.residual)
        return mlp(torch.cat(vectors), model.top_mlp)[0]

    shape = WukongShape(num_layers=3, fm_vectors=2, linear_vectors=1, rank=2, fm_mlp=(4,))
    make = {"num_dense": num_dense, "bottom_mlp": (4,), "shape": shape, "top_mlp": (5,)}
    check(Wukong(OneRowEach([3, 3]), **make), loop, batch_size, num_dense)


def self_attention(module: Any, vectors: list[Tensor]) -> list[Tensor]:
    """Equations 5 to 8 of arXiv 1810.11921, head by head and field by field."""
    part, heads = module.attention, module.attention.num_heads
    width = len(part.query.weight) // heads
    seen = []
    for e in vectors:
        pieces = []
        for columns in (slice(h * width, (h + 1) * width) for h in range(heads)):
            scores = torch.stack(
                [(part.query.weight[columns] @ e) @ (part.key.weight[columns] @ other) for other in vectors]
            )
            attention = scores.exp() / scores.exp().sum()
            pieces.append(sum(a * (part.value.weight[columns] @ o) for a, o in zip(attention, vectors, strict=True)))
        seen.append((torch.cat(pieces) + part.residual.weight @ e).clamp(min=0.0))
    return mix(module.mix, seen)


def crossed(module: Any, vectors: list[Tensor]) -> list[Tensor]:
    return mix(module.mix, list(full(module.cross, torch.cat(vectors)).split(len(vectors[0]))))


def dots(module: Any, vectors: list[Tensor]) -> list[Tensor]:
    pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
    u = torch.cat([vectors[0], torch.stack(pairs)])
    return list((module.linear.weight @ u + module.linear.bias).split(len(vectors[0])))


def convolution(module: Any, vectors: list[Tensor]) -> list[Tensor]:
    seen = []
    for weight, bias in zip(module.kernel.weight.view(-1, 3, 3), module.kernel.bias, strict=True):
        for m in range(len(vectors)):
            elements = []
            for d in range(len(vectors[0])):
                total = bias
                for i in range(3):
                    for j in range(3):
                        row, column = m + i - 1, d + j - 1
                        if 0 <= row < len(vectors) and 0 <= column < len(vectors[0]):
                            total = total + weight[i, j] * vectors[row][column]
                elements.append(total)
            seen.append(torch.stack(elements))
    return mix(module.mix, seen)


MODULES: dict[str, Callable[[Any, list[Tensor]], list[Tensor]]] = {
    "self_attention": self_attention,
    "cross": crossed,
    "dot": dots,
    "linear": mix,
    "convolution": convolution,
}


def dhen(model: DHEN, dense: Tensor, rows: Tensor) -> Tensor:
    vectors = first_vectors(model, dense, rows)
    for layer in model.layers:
        made = [MODULES[kind](module, vectors) for kind, module in layer.interactions.items()]
        if layer.ensemble == "concat":
            together = [y for vectors_of_one in made for y in vectors_of_one]
        else:
            weights = layer.weights if layer.ensemble == "weighted" else [1.0] * len(made)
            together = [sum(w * y for w, y in zip(weights, ys, strict=True)) for ys in zip(*made, strict=True)]
        vectors = added_and_normalised(layer, together, vectors, layer.shortcut)
    return mlp(torch.cat(vectors), model.top_mlp)[0]


@pytest.mark.parametrize("kind", MODULES)
def test_dhen_of_one_interaction(kind: Any) -> None:
    """Two layers have three vectors of width 4 each, the second through the shortcut X."""
    shape = DHENShape(num_layers=2, interactions={kind: 3}, num_channels=2)
    check(DHEN(OneRowEach([4, 4]), num_dense=2, bottom_mlp=(3,), shape=shape, top_mlp=()), dhen, 2)


@BATCHES
@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("ensemble", ["concat", "sum", "weighted"])
def test_dhen(ensemble: Any, num_dense: int, batch_size: int) -> None:
    number = {"concat": (2, 3, 1, 2, 1)}.get(ensemble, (2, 2, 2, 2, 2))
    shape = DHENShape(num_layers=2, interactions=dict(zip(MODULES, number, strict=True)), ensemble=ensemble)
    make = {"num_dense": num_dense, "bottom_mlp": (3,), "shape": shape, "top_mlp": (5,)}
    check(DHEN(OneRowEach([2, 2]), **make), dhen, batch_size, num_dense)
