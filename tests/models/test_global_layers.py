"""Tests of dropout and batch norm in one process: torch's layers, the distribution of masks, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from meseta.comm import BatchSlice, World
from meseta.config import ModelConfig
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection
from meseta.measure.threads import use_num_threads
from meseta.models import DLRM, MLP, MLPOptions, make_model
from meseta.models.global_layers import SyncBatchNorm, dropout, dropout_mask
from meseta.ops.random_rows import random_bits, table_key
from meseta.pipeline import Pipeline
from meseta.pipeline.losses import NonFiniteLoss
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, TableSpec
from meseta.train.evaluate import evaluation_mode
from model_parts import OneRowEach


def one_rank(size: int, step: int = 0) -> BatchSlice:
    return BatchSlice(world=World.single(), step=step, batch_size_per_rank=(size,))


def on_rank(rank: int, sizes: tuple[int, ...], step: int = 0) -> BatchSlice:
    world = World(rank=rank, size=len(sizes), device=torch.device("cpu"))
    return BatchSlice(world=world, step=step, batch_size_per_rank=sizes)


# Dropout


@pytest.mark.parametrize("width", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("sizes", [(6, 0, 1), (2, 2, 3), (0, 0, 7)])
def test_the_mask_of_a_sample_is_independent_of_its_place(sizes: tuple[int, ...], width: int) -> None:
    whole = dropout_mask(0.4, 3, "top_mlp.0", one_rank(7, 11), width)
    assert whole.shape == (7, width)
    parts = [dropout_mask(0.4, 3, "top_mlp.0", on_rank(r, sizes, 11), width) for r in range(3)]
    assert torch.equal(torch.cat(parts), whole)


def test_masks_are_halves_of_the_words_of_the_generator() -> None:
    words = random_bits(table_key(3, "dropout/a/5"), (0, 9), (0, 4)).numpy()
    halves = np.stack([words & 0xFFFF, words >> 16], axis=2).reshape(9, 8)[:, :7]
    expected = (halves ^ 0x8000) >= round(0.3 * 65536)
    np.testing.assert_array_equal(dropout_mask(0.3, 3, "a", one_rank(9, 5), 7).numpy(), expected)


def test_another_seed_step_or_layer_has_other_masks() -> None:
    def mask(seed: int = 1, step: int = 1, layer: str = "a") -> torch.Tensor:
        return dropout_mask(0.5, seed, layer, one_rank(100, step), 100)

    for other in (mask(seed=2), mask(step=2), mask(layer="b")):
        agreement = float((other == mask()).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / 100  # five standard deviations of 10,000 fair coins


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999])
def test_as_many_are_kept_as_the_rate_says(rate: float) -> None:
    kept = dropout_mask(rate, 0, "a", one_rank(1000), 300).double()
    spread = (rate * (1 - rate) / 300_000) ** 0.5
    assert abs(float(kept.mean()) - (1 - rate)) <= 5 * spread + 2**-17
    if rate == 0.5:
        columns = np.corrcoef(kept.numpy().T) - np.eye(300)
        assert np.abs(columns).max() < 6 / 1000**0.5  # neighbours in a word are as independent as the others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_values_grow_and_gradients_follow_the_mask(dtype: torch.dtype) -> None:
    x = torch.ones(50, 6, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.25, 0, "a", one_rank(50))
    y.sum().backward()
    mask = dropout_mask(0.25, 0, "a", one_rank(50), 6)
    assert y.dtype == dtype and torch.equal(y.detach(), (mask.double() / 0.75).to(dtype))
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert dropout(torch.full((3, 2), torch.nan), 0.9, 0, "a", one_rank(3)).isnan().all()


# Batch norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_batch_norm_is_that_of_torch_on_one_rank(dtype: torch.dtype, tolerance: float) -> None:
    layer, torchs = SyncBatchNorm(5).to(dtype), nn.BatchNorm1d(5, dtype=dtype)
    close: Any = {"rtol": tolerance, "atol": tolerance}
    with torch.no_grad():
        for module in (layer, torchs):
            module.weight.copy_(torch.linspace(-1, 2, 5))
            module.bias.copy_(torch.linspace(3, 1, 5))
    for step in range(3):
        data = torch.randn(8, 5, dtype=dtype) * (1 + step) + 10
        x, y = data.clone().requires_grad_(), data.clone().requires_grad_()
        outputs = layer(x, one_rank(8)), torchs(y)
        torch.testing.assert_close(*outputs, **close)
        upstream = torch.randn(8, 5, dtype=dtype)
        for output in outputs:
            output.backward(upstream)
        torch.testing.assert_close(x.grad, y.grad, **close)
        for name in ("weight", "bias"):
            torch.testing.assert_close(getattr(layer, name).grad, getattr(torchs, name).grad, **close)
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(layer, name), getattr(torchs, name), **close)
    torch.testing.assert_close(layer(data, None), torchs.eval()(data), **close)


def test_batch_norm_gradients_equal_finite_differences() -> None:
    layer = SyncBatchNorm(3).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    nn.init.normal_(layer.weight)

    def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, parameters, (x, one_rank(4)))

    assert torch.autograd.gradcheck(normalise, (x, layer.weight, layer.bias))


def test_one_sample_and_none() -> None:
    layer = SyncBatchNorm(3)
    for size in (1, 0):
        x = torch.full((size, 3), 7.0, requires_grad=True)
        y = layer(x, one_rank(size))
        assert y.shape == (size, 3) and not y.any()
        y.sum().backward()
        assert x.grad is not None and not x.grad.any()
    assert torch.allclose(layer.running_mean, torch.full((3,), 0.7)) and layer.running_var.isfinite().all()


@pytest.mark.parametrize("options", [MLPOptions(dropout=0.3, batch_norm=True), MLPOptions(batch_norm=True)])
def test_threads_change_no_bit(options: MLPOptions) -> None:
    results = []
    for count in (1, 2):
        torch.manual_seed(0)
        stack, x = MLP([40, 130, 70, 1], relu_last=False, options=options), torch.randn(700, 40)
        for parameter in stack.parameters():
            nn.init.normal_(parameter)
        with use_num_threads(count):
            y = stack(x, one_rank(700))
            y.square().mean().backward()
        results.append([y.detach(), *stack.buffers(), *(p.grad for p in stack.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# In stacks and models


@pytest.mark.parametrize("relu_last", [False, True])
def test_a_hidden_layer_is_linear_norm_relu_dropout(relu_last: bool) -> None:
    options = MLPOptions(dropout=0.5, batch_norm=True, seed=9)
    stack = MLP([3, 6, 5, 2], relu_last=relu_last, options=options, name="deep").double()
    assert [type(m).__name__ for m in stack.norms] == ["SyncBatchNorm"] * 2
    for parameter in stack.parameters():
        nn.init.normal_(parameter)
    data, batch = torch.randn(20, 3, dtype=torch.float64), one_rank(20, step=4)
    layers = [layer for layer in stack if isinstance(layer, nn.Linear)]
    x = data
    for index, (layer, norm) in enumerate(zip(layers[:-1], stack.norms, strict=True)):
        x = functional.batch_norm(layer(x), None, None, norm.weight, norm.bias, training=True)
        x = functional.relu(x) * dropout_mask(0.5, 9, f"deep.{index}", batch, x.shape[1]) * 2
    expected = functional.relu(layers[-1](x)) if relu_last else layers[-1](x)
    torch.testing.assert_close(stack(data, batch), expected, rtol=0, atol=1e-12)
    stack.eval()
    x = data
    for layer, norm in zip(layers[:-1], stack.norms, strict=True):
        x = functional.relu(
            functional.batch_norm(layer(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
    expected = functional.relu(layers[-1](x)) if relu_last else layers[-1](x)
    torch.testing.assert_close(stack(data), expected, rtol=0, atol=1e-12)


def test_a_stack_without_the_position_of_its_samples() -> None:
    for options in (MLPOptions(dropout=0.5), MLPOptions(batch_norm=True)):
        stack = MLP([3, 4, 1], relu_last=False, options=options, name="deep")
        with pytest.raises(
            MesetaError, match=r"deep: .* the position of the 2 samples .* got that of nothing; look up"
        ):
            stack(torch.zeros(2, 3))
        with pytest.raises(MesetaError, match="got that of 5 samples"):
            stack(torch.zeros(2, 3), one_rank(5))
        assert stack.eval()(torch.zeros(2, 3)).shape == (2, 1)
    assert MLP([3, 4, 1], relu_last=False)(torch.zeros(2, 3)).shape == (2, 1)
    with pytest.raises(MesetaError, match="at least 0 and below 1, got 1"):
        MLPOptions(dropout=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcnv2", "deepfm", "wide_deep", "xdeepfm", "autoint", "mmoe"])
def test_every_model_with_an_mlp_has_them(name: str, dtype: Any) -> None:
    sizes = {"bottom_mlp": (8,), "top_mlp": (8,), "deep_mlp": (8,), "expert_mlp": (8, 8), "tower_mlp": (8,)}
    config = ModelConfig(name=name, embedding_dim=4, dropout=0.3, batch_norm=True, **sizes)
    dim = config.table_width()
    model = make_model(config, tables(dim), 2, 0, dtype)
    dense, sparse = torch.randn(30, 2), KeyedJaggedTensor.from_lists({"seen": [[i % 5] for i in range(30)]})
    first = model(dense, sparse)
    assert torch.equal(first, model(dense, sparse))  # the same step has the same masks
    first.sum().backward()
    assert not torch.equal(first, model(dense, sparse))
    moved = {key: value.clone() for key, value in model.state_dict().items() if "running_mean" in key}
    assert moved and all(value.any() for value in moved.values())
    with evaluation_mode(model), torch.no_grad():
        few = KeyedJaggedTensor.from_lists({"seen": [[i % 5] for i in range(7)]})
        torch.testing.assert_close(model(dense, sparse)[:7], model(dense[:7], few), rtol=0, atol=1e-5)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in moved.items())


def test_models_without_a_hidden_layer_refuse_them() -> None:
    for changes in ({"dropout": 0.1}, {"batch_norm": True}):
        with pytest.raises(MesetaError, match="'autoint' has no hidden layers"):
            make_model(ModelConfig(name="autoint", deep_mlp=(), **changes), OneRowEach([16]), 2, 0)
        for name in ("logistic_regression", "fm", "own_models:Plain"):
            with pytest.raises(ValueError, match=rf"{name}': model\.(dropout 0.1|batch_norm True) applies to hidden"):
                ModelConfig(name=name, **changes)


def tables(dim: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [TableSpec(name="item", num_embeddings=5, embedding_dim=dim)], [FeatureSpec(name="seen", table="item")]
    )


def test_a_non_finite_loss_leaves_the_running_statistics() -> None:
    options = MLPOptions(batch_norm=True)
    model = DLRM(tables(3), num_dense=2, bottom_mlp=(4, 3), top_mlp=(4,), options=options)
    step = Pipeline(model, torch.optim.SGD(model.parameters(), lr=0.1), World.single())

    def batch(value: float) -> Batch:
        sparse = KeyedJaggedTensor.from_lists({"seen": [[0], [1], [2]]})
        return Batch(
            dense=torch.tensor([[1.0, 2.0], [3.0, value], [0, 1]]), sparse=sparse, label=torch.tensor([1.0, 0, 1])
        )

    with pytest.raises(NonFiniteLoss):
        step(batch(torch.nan))
    assert all(not value.any() for key, value in model.state_dict().items() if "running_mean" in key)
    step(batch(1.0))
    assert all(value.any() for key, value in model.state_dict().items() if "running_mean" in key)
