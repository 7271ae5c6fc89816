"""The models that lead published comparisons against loops over their papers' formulas: outputs, and all gradients.

A loop scores one sample, from its dense inputs and its pooled rows, in float64; torch differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meseta.models.cross import CrossShape
from meseta.models.interactions.dcnv2 import DCNv2
from meseta.models.interactions.gdcn import GDCN
from model_parts import OneRowEach, some_dense, some_ids

Loop = Callable[[Any, Tensor, Tensor], Tensor]
BATCHES = pytest.mark.parametrize("batch_size", [0, 1, 3])


def check(model: nn.Module, loop: Loop, batch_size: int, num_dense: int = 2) -> None:
    """Equal to 1e-10, on weights without zeros in which a wrong place would not show."""
    model.double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    num_features = len(model.embeddings.features)
    dense = some_dense(batch_size, num_dense).requires_grad_()
    pooled = model.embeddings(some_ids(num_features, batch_size)).pooled.values.detach().requires_grad_()
    parameters = {n: p for n, p in model.named_parameters() if not n.startswith("embeddings.")}
    leaves = [dense, pooled, *parameters.values()]
    found = model.score(dense, pooled)
    wanted = torch.stack([loop(model, x, rows) for x, rows in zip(dense, pooled, strict=True)] or [dense.sum()])
    weights = torch.arange(1.0, batch_size + 1, dtype=torch.float64)
    assert found.shape == (batch_size,)
    if not batch_size:
        return
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    theirs = torch.autograd.grad((wanted * weights).sum(), leaves)
    for name, mine, exact in zip(("dense", "pooled", *parameters), ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


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
    """Expert by expert, as equations 3 and 4 of arXiv 2008.13535 have it."""
    x = x0
    for gates, down, inner, up in zip(cross.gates, cross.down, cross.inner, cross.up, strict=True):
        rank, total = len(inner[0]), x
        share = (gates.weight @ x).exp() / (gates.weight @ x).exp().sum()
        for i, c in enumerate(inner):
            own = slice(i * rank, (i + 1) * rank)
            inside = cross.activate(c @ cross.activate(down.weight[own] @ x))
            total = total + share[i] * (x0 * (up.weight[:, own] @ inside + up.bias))
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
