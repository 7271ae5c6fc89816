"""Tests of recent interaction models: layer norm, hidden layers in training, threads and errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice, World
from meseta.config.models.interactions import Interaction
from meseta.measure.threads import use_num_threads
from meseta.models import MLPOptions
from meseta.models.global_layers import LayerNorm, dropout_mask
from meseta.models.interactions.deep_cross import GDCN, CrossShape, DCNv2
from meseta.models.interactions.dhen import DHEN, DHENShape
from meseta.models.interactions.final import FinalBlock, FinalNet, FinalShape
from meseta.models.interactions.finalmlp import FinalMLP, StreamShape
from meseta.models.interactions.masknet import MaskNet, MaskShape
from meseta.models.interactions.wukong import Wukong, WukongShape
from meseta.models.layers import HiddenLayers
from meseta.spec import MesetaError
from model_parts import OneRowEach, some_dense

EVERY: tuple[Interaction, ...] = ("self_attention", "cross", "dot", "linear", "convolution")
Maker = Callable[..., Any]
MAKERS: dict[str, Maker] = {
    "dcnv2 full": partial(DCNv2, cross=CrossShape(kind="full"), deep_mlp=(6, 5)),
    "dcnv2 low_rank": partial(DCNv2, cross=CrossShape(kind="low_rank"), structure="parallel", deep_mlp=(6, 5)),
    "dcnv2 mixture": partial(DCNv2, cross=CrossShape(kind="mixture", low_rank=3), deep_mlp=(6, 5)),
    "gdcn": partial(GDCN, cross_layers=2, deep_mlp=(6, 5)),
    "masknet serial": partial(MaskNet, shape=MaskShape(widths=(6, 5))),
    "masknet parallel": partial(MaskNet, shape=MaskShape(structure="parallel", widths=(6, 5)), deep_mlp=(6, 5)),
    "finalmlp": partial(FinalMLP, streams=(StreamShape(mlp=(6, 4)), StreamShape(mlp=(4,), context=("f0",)))),
    "final": partial(FinalNet, shape=FinalShape(), blocks=((6, 4), (6,))),
    "wukong": partial(Wukong, bottom_mlp=(6,), shape=WukongShape(fm_mlp=(6,)), top_mlp=(6, 5)),
    "dhen": partial(DHEN, bottom_mlp=(6,), shape=DHENShape(interactions=dict.fromkeys(EVERY, 2)), top_mlp=(6, 5)),
}
EACH = pytest.mark.parametrize("name", MAKERS)


def made(name: str, **changes: Any) -> Any:
    return MAKERS[name](**{"embeddings": OneRowEach([4, 4, 4]), "num_dense": 3, **changes})


def dense_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if not n.startswith("embeddings.")}


def scored(model: Any, size: int = 70) -> dict[str, Tensor]:
    """Return logits and the gradients of dense parameters, dense inputs and pooled embeddings."""
    dtype = next(iter(dense_parameters(model).values())).dtype
    generator = torch.Generator().manual_seed(1)
    pooled = torch.randn(size, 12, generator=generator).to(dtype).requires_grad_()
    model.zero_grad()
    logits = model.score(some_dense(size, model.num_dense).to(dtype), pooled)
    logits.square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if not n.startswith("embeddings.")}
    return {"logits": logits.detach(), "pooled": pooled.grad, **gradients}


# Layer norm


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1,)])
@pytest.mark.parametrize("size", [0, 1, 70])
def test_layer_norm_is_that_of_torch(shape: tuple[int, ...], size: int) -> None:
    layer = LayerNorm(*shape).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(size, *shape, dtype=torch.float64, requires_grad=True)
    expected = functional.layer_norm(x, shape[-1:]) * layer.weight + layer.bias
    cotangent = torch.randn_like(x)
    leaves = [x, layer.weight, layer.bias]
    expected_gradients = torch.autograd.grad(expected, leaves, cotangent)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    for gradient, exact in zip(torch.autograd.grad(layer(x), leaves, cotangent), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-11)
    assert layer.float()(x.detach().bfloat16()).dtype == torch.bfloat16


# Hidden layers while training


@pytest.mark.parametrize("residual", ["concat", "sum"])
def test_a_factorized_layer_is_followed_by_norm_and_dropout(residual: Any) -> None:
    options = MLPOptions(dropout=0.5, batch_norm=True, seed=9)
    block = FinalBlock(3, (6, 4), shape=FinalShape(residual=residual), options=options, name="blocks.0").double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    batch = BatchSlice(world=World.single(), step=4, batch_size_per_rank=(20,))
    data = x = torch.randn(20, 3, dtype=torch.float64)
    for index, (layer, norm) in enumerate(zip(block.layers, block.norms, strict=True)):
        a, g = functional.linear(x, layer.weight, layer.bias).chunk(2, dim=1)
        x = torch.cat([a, a * g], dim=1) if residual == "concat" else a + a * g
        x = functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        x = functional.relu(x) * dropout_mask(0.5, 9, f"blocks.0.{index}", batch, x.shape[1]) * 2
    expected = functional.linear(x, block.head.weight, block.head.bias)[:, 0]
    torch.testing.assert_close(block(data, batch), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rates", [(0.25, None), (0.0, 0.5), (None, None)])
def test_each_stream_has_its_dropout(rates: tuple[float | None, float | None]) -> None:
    """A stream without a rate has that of the options. Gradients agree too."""
    shapes = (StreamShape(mlp=(7, 4), dropout=rates[0]), StreamShape(mlp=(4,), dropout=rates[1]))
    options = MLPOptions(dropout=0.75, seed=9)
    model = made("finalmlp", streams=shapes, feature_gates=False, options=options).double()
    batch = BatchSlice(world=World.single(), step=4, batch_size_per_rank=(20,))
    model.embeddings.batch_slice = batch
    dense, pooled = some_dense(20, 3), torch.randn(20, 12, dtype=torch.float64)
    outputs = []
    for stream, rate in enumerate(rates):
        x, share = torch.cat([dense, pooled], dim=1), 0.75 if rate is None else rate
        for index, layer in enumerate(part for part in model.streams[stream] if isinstance(part, nn.Linear)):
            x = functional.relu(functional.linear(x, layer.weight, layer.bias))
            x = x * dropout_mask(share, 9, f"streams.{stream}.{index}", batch, x.shape[1]) / (1 - share)
        outputs.append(x)
    fusion, (first, second) = model.fusion, outputs
    bilinear = torch.einsum("bi,ji,bj->b", first, fusion.heads[0], second)
    expected = first @ fusion.first.weight[0] + second @ fusion.second.weight[0] + fusion.first.bias + bilinear
    logits = model.score(dense, pooled)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    parameters = list(model.streams.parameters())
    gradients = (torch.autograd.grad(value.square().sum(), parameters) for value in (logits, expected))
    for ours, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-11)


def test_each_block_also_learns_the_combined_prediction() -> None:
    model = made("final").double()
    assert model.loss_terms == ("first_block", "second_block") and not made("final", blocks=((6,),)).loss_terms
    assert not made("final", shape=FinalShape(mutual_loss=False)).loss_terms
    dense, pooled = some_dense(9, 3), torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    logits, terms = model.score_with_losses(dense, pooled, torch.zeros(9))
    assert torch.equal(logits, model.score(dense, pooled)) and list(terms) == list(model.loss_terms)
    p = logits.detach().sigmoid()
    for said, term in zip(model.block_logits(model.encode_dense(dense), pooled).T, terms.values(), strict=True):
        q = said.sigmoid()
        torch.testing.assert_close(term, -(p * q.log() + (1 - p) * (1 - q).log()), rtol=0, atol=1e-12)
    of_both = torch.autograd.grad(sum(term.sum() for term in terms.values()), pooled, retain_graph=True)[0]
    expected = torch.zeros_like(pooled)  # the target has no gradient
    for said in model.block_logits(model.encode_dense(dense), pooled).T:
        expected = expected + torch.autograd.grad(said, pooled, said.detach().sigmoid() - p, retain_graph=True)[0]
    torch.testing.assert_close(of_both, expected, rtol=0, atol=1e-12)


def stacks(name: str) -> set[str]:
    """Return the names under which hidden layers of a model draw their masks."""
    model = made(name, options=MLPOptions(dropout=0.5))
    hidden = (part for part in model.modules() if isinstance(part, HiddenLayers) and part.options.dropout)
    return {f"{part.name}.{index}" for part in hidden for index in range(part.num_hidden)}


def test_every_hidden_layer_has_separate_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def watched(rate: float, seed: int, layer: str, batch: BatchSlice, width: int) -> Tensor:
        drawn.append(layer)
        return dropout_mask(rate, seed, layer, batch, width)

    monkeypatch.setattr("meseta.models.global_layers.dropout_mask", watched)
    for name in MAKERS:
        drawn.clear()
        model = made(name, options=MLPOptions(dropout=0.5))
        model.embeddings.batch_slice = BatchSlice(world=World.single(), step=0, batch_size_per_rank=(5,))
        first = scored(model, 5)
        assert sorted(drawn) == sorted(stacks(name)) and len(set(drawn)) == len(drawn) >= 2, name
        again = scored(model, 5)
        assert all(torch.equal(first[key], again[key]) for key in first)
        model.eval()
        assert not torch.equal(scored(model, 5)["logits"], first["logits"])


# Weights, types and threads


@EACH
def test_initial_weights_are_a_function_of_seed_and_name(name: str) -> None:
    torch.manual_seed(1)
    first = dense_parameters(made(name, seed=7))
    torch.manual_seed(2)
    second, other = dense_parameters(made(name, seed=7)), dense_parameters(made(name, seed=8))
    assert all(torch.equal(first[key], second[key]) for key in first)
    drawn = {key for key in first if first[key].std(correction=0) > 0}
    assert len(drawn) >= 4 and all(not torch.equal(first[key], other[key]) for key in drawn)
    matrices = {key for key, value in first.items() if value.dim() > 1 and "norm" not in key}
    assert matrices - drawn <= {"field_gate.gates.linear.weight"}


@pytest.mark.parametrize("num_heads", [1, 10])
def test_the_heads_of_a_fusion_start_as_one_column(num_heads: int) -> None:
    """torch's xavier for a matrix with one column per output, in which the authors' code holds all heads."""
    streams = (StreamShape(mlp=(400,)), StreamShape(mlp=(300,)))
    heads = made("finalmlp", streams=streams, num_heads=num_heads).fusion.heads.detach()
    assert heads.shape == (num_heads, 300 // num_heads, 400 // num_heads)
    column = nn.init.xavier_normal_(torch.empty(heads.numel(), 1), generator=torch.Generator().manual_seed(0))
    precision = 5 / (2 * heads.numel()) ** 0.5  # five standard errors of a standard deviation
    assert heads.std().item() == pytest.approx((2 / (1 + 400 * 300 / num_heads)) ** 0.5, rel=precision)
    assert heads.std().item() == pytest.approx(column.std().item(), rel=2 * precision)
    assert abs(heads.mean().item()) < 5 * heads.std().item() / heads.numel() ** 0.5


@EACH
def test_bfloat16_and_float32_stay_close_to_float64(name: str) -> None:
    exact = scored(made(name).double())
    for dtype, smallest, largest in (("float32", 1e-9, 5e-6), ("bfloat16", 1e-4, 0.1)):
        scores = scored(made(name, options=MLPOptions(dtype=dtype)))
        assert all(tensor.dtype == torch.float32 for tensor in scores.values())
        error = sum(float((scores[key] - exact[key]).square().sum()) for key in exact) ** 0.5
        whole = sum(float(tensor.square().sum()) for tensor in exact.values()) ** 0.5
        assert smallest < error / whole < largest


@EACH
@pytest.mark.parametrize("size", [3, 700])
def test_threads_change_no_bit(name: str, size: int) -> None:
    results = []
    for count in (1, 2, 3):
        with use_num_threads(count):
            results.append(scored(made(name), size))
    for other in results[1:]:
        assert [key for key in other if not torch.equal(other[key], results[0][key])] == []


@EACH
def test_no_dense_inputs_and_no_samples(name: str) -> None:
    bare = made(name, num_dense=0)
    assert not [key for key in dense_parameters(bare) if key.startswith("bottom")]
    assert scored(bare, 3)["logits"].isfinite().all()
    logits = made(name).score(torch.zeros(0, 3), torch.zeros(0, 12, requires_grad=True))
    assert logits.shape == (0,)
    logits.sum().backward()


# Refusals


def refused(make: Callable[[], Any], *words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        make()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_mismatched_arguments_are_named() -> None:
    for model in ("DCNv2", "GDCN"):
        key = "dcnv2 full" if model == "DCNv2" else "gdcn"
        refused(lambda k=key: made(k, structure="parallel", deep_mlp=()), f"{model}: deep_mlp is empty", "'stacked'")
        refused(lambda k=key: made(k, deep_mlp=(0,)), "deep_mlp must be at least 1")
    refused(lambda: made("dcnv2 full", cross=CrossShape(num_layers=0)), "DCNv2: widths in cross", "[0, 64, 4]")
    refused(lambda: made("gdcn", cross_layers=0), "GDCN: widths in cross_layers")
    refused(lambda: made("masknet serial", shape=MaskShape(widths=())), "MaskNet: blocks must not be empty")
    refused(lambda: made("masknet serial", deep_mlp=(3,)), "deep_mlp [3] requires structure 'parallel'")
    for name, model in (("masknet serial", "MaskNet"), ("final", "FinalNet"), ("wukong", "Wukong"), ("dhen", "DHEN")):
        refused(lambda n=name: made(n, embeddings=OneRowEach([4, 3])), f"{model}: feature 'f1'", "embedding_dim=4")


def test_streams_that_do_not_fit_are_named() -> None:
    def streams(**changes: Any) -> tuple[StreamShape, StreamShape]:
        return StreamShape(mlp=(4,)), StreamShape(**{"mlp": (6, 4), **changes})

    refused(lambda: made("finalmlp", streams=streams(mlp=())), "FinalMLP: stream 2 has no layer")
    refused(
        lambda: made("finalmlp", streams=streams(mlp=(6, 5)), num_heads=2),
        "last layer of stream 2 must be a multiple",
        "got 5 and 2",
    )
    refused(
        lambda: made("finalmlp", streams=streams(context=("g0",))),
        "context 'g0' of a gate is not a feature",
        "available: f0, f1, f2",
    )
    refused(lambda: made("final", blocks=((6, 5),)), "must be even for residual 'concat', got 5", "residual 'sum'")
    refused(lambda: made("final", blocks=((6,), ())), "layer widths of one or two blocks")
    refused(lambda: made("final", blocks=((6,),) * 3), "layer widths of one or two blocks")


def test_interactions_that_do_not_fit_are_named() -> None:
    def shape(**changes: Any) -> DHENShape:
        return DHENShape(**changes)

    for ensemble in ("sum", "weighted"):
        uneven = shape(interactions={"dot": 8, "linear": 16}, ensemble=ensemble)
        refused(lambda s=uneven: made("dhen", shape=s), f"ensemble '{ensemble}'", "'dot' 8, 'linear' 16", "'concat'")
    odd = shape(interactions={"self_attention": 2}, num_heads=3)
    refused(lambda: made("dhen", shape=odd), "the 3 heads of 'self_attention'", "got 4")
    refused(
        lambda: made("dhen", shape=shape(interactions={"dot": 1})),
        "'dot' requires layers with at least two input vectors",
        "has only one",
    )
    assert made("dhen", shape=shape(interactions={"dot": 1}, num_layers=1))
    refused(lambda: made("dhen", shape=shape(interactions={})), "interactions must not be empty")
    refused(lambda: made("dhen", shape=shape(interactions={"dot": 0})), "interactions, num_heads", "[2, 0, 2, 4]")
