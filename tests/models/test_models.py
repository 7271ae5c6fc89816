"""Tests of models against numpy, literal values, numerical gradients, and of refused widths."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meseta.config import ModelConfig
from meseta.config.models import MODEL_NAMES
from meseta.embedding import EmbeddingBagCollection
from meseta.models import (
    DLRM,
    FM,
    AutoInt,
    DeepFM,
    DLRMDCNv2,
    LogisticRegression,
    MMoE,
    WideDeep,
    XDeepFM,
    make_model,
)
from meseta.models.layers import find_dense_forward
from meseta.spec import FeatureSpec, MesetaError, TableSpec
from model_parts import OneRowEach, some_dense, some_ids
from small_run import of_its_model


def numpy_mlp(x: np.ndarray, model: nn.Module, part: str, relu_last: bool) -> np.ndarray:
    layers = [layer for layer in model.get_submodule(part) if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(layers):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        if relu_last or index + 1 < len(layers):
            x = np.maximum(x, 0.0)
    return x


def numpy_dlrm(model: DLRM, dense: Tensor, pooled: Tensor, *, dot: bool) -> np.ndarray:
    x = numpy_mlp(dense.numpy(), model, "bottom_mlp", relu_last=True)
    logits = []
    for sample in range(len(x)):
        embedded = pooled[sample].detach().numpy()
        if dot:
            vectors = [x[sample], *embedded.reshape(-1, x.shape[1])]
            inner = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        else:
            inner = list(embedded)
        top_input = np.concatenate([x[sample], inner])[None]
        logits.append(numpy_mlp(top_input, model, "top_mlp", relu_last=False)[0, 0])
    return np.array(logits)


@pytest.mark.parametrize("batch_size", [0, 1, 5])
@pytest.mark.parametrize("interaction", ["dot", "none"])
def test_dlrm_equals_loops_in_numpy(interaction: Any, batch_size: int) -> None:
    embeddings = OneRowEach([4, 4, 4])
    model = DLRM(embeddings, num_dense=3, bottom_mlp=(6, 4), top_mlp=(8,), interaction=interaction, seed=5).double()
    dense, sparse = some_dense(batch_size, 3), some_ids(3, batch_size)
    logits = model(dense, sparse)
    assert logits.shape == (batch_size,) and logits.dtype == torch.float64
    expected = numpy_dlrm(model, dense, embeddings(sparse).pooled.values, dot=interaction == "dot")
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_dlrm_top_input_is_bottom_output_then_the_lower_triangle_row_by_row() -> None:
    model = DLRM(OneRowEach([1, 1]), num_dense=1, bottom_mlp=(1,), top_mlp=())
    with torch.no_grad():
        model.bottom_mlp[0].weight.fill_(1.0)
        model.bottom_mlp[0].bias.zero_()
        model.top_mlp[0].weight.copy_(torch.tensor([[1000.0, 100.0, 10.0, 1.0]]))
        model.top_mlp[0].bias.zero_()
    # x=2, e1=3, e2=5: x, e1.x, e2.x, e2.e1 = 2, 6, 10, 15
    assert model.score(torch.tensor([[2.0]]), torch.tensor([[3.0, 5.0]])).tolist() == [2000.0 + 600.0 + 100.0 + 15.0]
    # ReLU also after the last bottom layer: x=0, and only e2.e1 is left.
    assert model.score(torch.tensor([[-2.0]]), torch.tensor([[3.0, 5.0]])).tolist() == [15.0]


@pytest.mark.parametrize("batch_size", [0, 1, 5])
def test_dcnv2_equals_loops_in_numpy(batch_size: int) -> None:
    embeddings = OneRowEach([3, 5])  # mixed widths are fine here
    model = DLRMDCNv2(embeddings, num_dense=2, bottom_mlp=(6, 4), top_mlp=(8, 5), cross=(3, 2), seed=5).double()
    for up in model.cross.up:
        nn.init.normal_(up.bias)  # they start at zero, which would hide errors of order
    dense, sparse = some_dense(batch_size, 2), some_ids(2, batch_size)
    pooled = embeddings(sparse).pooled.values.detach().numpy()
    x0 = np.concatenate([numpy_mlp(dense.numpy(), model, "bottom_mlp", relu_last=True), pooled], axis=1)
    x = x0
    for down, up in zip(model.cross.down, model.cross.up, strict=True):
        u, v, b = (p.detach().numpy() for p in (up.weight, down.weight, up.bias))
        x = np.stack([x0[s] * (u @ (v @ x[s]) + b) + x[s] for s in range(len(x))]) if len(x) else x
    expected = numpy_mlp(x, model, "top_mlp", relu_last=False)[:, 0]
    np.testing.assert_allclose(model(dense, sparse).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_logistic_regression_is_a_sum_of_weights(batch_size: int) -> None:
    embeddings = OneRowEach([1, 1])
    model = LogisticRegression(embeddings, num_dense=2).double()
    assert all(not p.any() for p in model.linear.parameters())
    with torch.no_grad():
        model.linear.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.linear.bias.fill_(0.5)
    dense, sparse = some_dense(batch_size, 2), some_ids(2, batch_size)
    weight = [rows.detach()[:, 0].numpy() for rows in embeddings.rows]
    ids = sparse.values.numpy().reshape(2, batch_size)
    expected = 2.0 * dense[:, 0].numpy() - dense[:, 1].numpy() + 0.5 + weight[0][ids[0]] + weight[1][ids[1]]
    np.testing.assert_allclose(model(dense, sparse).detach().numpy(), expected, rtol=1e-12)


def small_models() -> list[nn.Module]:
    return [
        DLRM(OneRowEach([2, 2]), num_dense=2, bottom_mlp=(3, 2), top_mlp=(4,)),
        DLRM(OneRowEach([2, 3]), num_dense=2, bottom_mlp=(2,), top_mlp=(4,), interaction="none"),
        DLRMDCNv2(OneRowEach([2, 3]), num_dense=2, bottom_mlp=(2,), top_mlp=(4,), cross=(2, 2)),
        LogisticRegression(OneRowEach([1, 1]), num_dense=2),
        FM(OneRowEach([3, 3]), num_dense=2),
        DeepFM(OneRowEach([3, 3]), num_dense=2, deep_mlp=(4,)),
        WideDeep(OneRowEach([3, 3]), num_dense=2, deep_mlp=(4,)),
        AutoInt(OneRowEach([2, 2]), num_dense=2, attention=(2, 2, 1), deep_mlp=(2,)),
        AutoInt(OneRowEach([2, 2]), num_dense=2, attention=(1, 1, 2)),
        XDeepFM(OneRowEach([3, 3]), num_dense=2, cin_layers=(2, 2), deep_mlp=(3,)),
        MMoE(OneRowEach([2, 3]), num_dense=2, num_tasks=2, experts=[(3,), (2, 3)], tower_mlp=(2,)),
    ]


@pytest.mark.parametrize("index", range(11))
def test_gradients_equal_finite_differences(index: int) -> None:
    model = small_models()[index].double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    dense = some_dense(2, 2).requires_grad_()
    pooled = model.embeddings(some_ids(2, 2)).pooled.values.detach().requires_grad_()
    weights = {n: p for n, p in model.named_parameters() if not n.startswith("embeddings.")}

    def score(dense: Tensor, pooled: Tensor, *values: Tensor) -> Tensor:
        replaced = {f"model.{name}": value for name, value in zip(weights, values, strict=True)}
        return torch.func.functional_call(Scorer(model), replaced, (dense, pooled))

    assert torch.autograd.gradcheck(score, (dense, pooled, *weights.values()))


class Scorer(nn.Module):
    """Module whose forward pass is `score`, for functional_call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.model.score(dense, pooled)


@pytest.mark.parametrize("index", range(11))
def test_float32_inputs_to_a_float64_model(index: int) -> None:
    model = small_models()[index].double()
    sparse = some_ids(2, 3)
    assert model(some_dense(3, 2).float(), sparse).dtype == torch.float64


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_no_dense_inputs_and_no_samples(name: Any) -> None:
    sizes = {"embedding_dim": 2, "bottom_mlp": (3,), "top_mlp": (3,), "cross_low_rank": 2}
    config = ModelConfig(**of_its_model({"name": name, **sizes}))
    dim = config.table_width()
    bare = make_model(config, OneRowEach([dim, dim]), 0, 0)
    assert bare(torch.zeros(3, 0), some_ids(2, 3)).isfinite().all()
    pooled = torch.zeros(0, 2 * dim, requires_grad=True)
    nothing = make_model(config, OneRowEach([dim, dim]), 1, 0).score(torch.zeros(0, 1), pooled)
    assert nothing.shape == (0,)
    nothing.sum().backward()
    assert pooled.grad is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_dense_inputs_no_layer_replaces_them(dtype: Any) -> None:
    """The top MLP of DLRM reads the products of pairs of embeddings; no layer is made of biases alone."""
    embeddings, pooled = OneRowEach([4, 4, 4]), torch.randn(5, 12)
    for name in ("dlrm", "dlrm_dcnv2"):
        model: Any = make_model(ModelConfig(name=name, embedding_dim=4, cross_low_rank=2), embeddings, 0, 0, dtype)
        assert model.bottom_mlp is None and find_dense_forward(model) is None
        assert not [key for key, _ in model.named_parameters() if key.startswith("bottom_mlp")]
        assert model.score(torch.zeros(5, 0), pooled).shape == (5,)
    a, b, c = pooled.view(5, 3, 4).unbind(1)
    model = make_model(ModelConfig(embedding_dim=4), embeddings, 0, 0)
    products = torch.stack([(a * b).sum(1), (a * c).sum(1), (b * c).sum(1)], dim=1)
    torch.testing.assert_close(model.score(torch.zeros(5, 0), pooled), model.top_mlp(products).squeeze(1))
    x = torch.randn(2, 4)
    for interaction in ("none", "dot"):
        alone: Any = make_model(ModelConfig(embedding_dim=4, interaction=interaction), OneRowEach([4]), 0, 0)
        assert torch.equal(alone.score(torch.zeros(2, 0), x), alone.top_mlp(x).squeeze(1))


CONFIGS = [
    ModelConfig(name="dlrm", embedding_dim=4, bottom_mlp=(50, 20), top_mlp=(30,)),
    ModelConfig(name="dlrm", interaction="none", embedding_dim=4, bottom_mlp=(5,), top_mlp=(3,)),
    ModelConfig(name="dlrm_dcnv2", embedding_dim=4, bottom_mlp=(5,), top_mlp=(3,), cross_layers=2, cross_low_rank=3),
    ModelConfig(name="fm", embedding_dim=4),
    ModelConfig(name="deepfm", embedding_dim=4, deep_mlp=(5, 3)),
    ModelConfig(name="wide_deep", embedding_dim=4, deep_mlp=(5, 3)),
    ModelConfig(name="xdeepfm", embedding_dim=4, deep_mlp=(5, 3), cin_layers=(3, 2)),
    ModelConfig(name="autoint", embedding_dim=4, deep_mlp=(5, 3), attention_layers=2, attention_dim=3),
    ModelConfig(name="mmoe", embedding_dim=4, num_experts=2, expert_mlp=(5, 4), tower_mlp=(3,)),
    ModelConfig(name="logistic_regression", embedding_dim=4),
]


def built(config: ModelConfig, seed: int, num_features: int = 3) -> nn.Module:
    return make_model(config, OneRowEach([config.table_width()] * num_features), 13, seed)


def dense_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if not n.startswith("embeddings.")}


def test_factory_builds_the_configured_model() -> None:
    types = [type(built(config, 0)) for config in CONFIGS]
    assert types == [DLRM, DLRM, DLRMDCNv2, FM, DeepFM, WideDeep, XDeepFM, AutoInt, MMoE, LogisticRegression]
    assert [config.table_width() for config in CONFIGS] == [4, 4, 4, 5, 5, 5, 5, 4, 4, 1]
    shapes = {n: tuple(p.shape) for n, p in dense_parameters(built(CONFIGS[0], 0)).items()}
    assert shapes == {
        "bottom_mlp.0.weight": (50, 13),
        "bottom_mlp.0.bias": (50,),
        "bottom_mlp.2.weight": (20, 50),
        "bottom_mlp.2.bias": (20,),
        "bottom_mlp.4.weight": (4, 20),
        "bottom_mlp.4.bias": (4,),
        "top_mlp.0.weight": (30, 4 + 6),
        "top_mlp.0.bias": (30,),
        "top_mlp.2.weight": (1, 30),
        "top_mlp.2.bias": (1,),
    }
    cross = {n: tuple(p.shape) for n, p in dense_parameters(built(CONFIGS[2], 0)).items() if n.startswith("cross")}
    assert cross == {
        **{f"cross.down.{i}.weight": (3, 16) for i in range(2)},
        **{f"cross.up.{i}.weight": (16, 3) for i in range(2)},
        **{f"cross.up.{i}.bias": (16,) for i in range(2)},
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_initial_weights_are_a_function_of_seed_and_name(config: ModelConfig) -> None:
    torch.manual_seed(123)
    first = dense_parameters(built(config, seed=7))
    embeddings = OneRowEach([config.table_width()] * 3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    second = dense_parameters(make_model(config, embeddings, 13, 7))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    if config.name != "logistic_regression":
        other = dense_parameters(built(config, seed=8))
        drawn = [n for n in first if first[n].any() or not (n.endswith("bias") or n == "first_order.dense.weight")]
        assert drawn and all(not torch.equal(first[n], other[n]) for n in drawn)
        deep = {"top_mlp": (9, 9), "deep_mlp": (9, 9), "tower_mlp": (9, 9)}
        deeper = dense_parameters(built(config.model_copy(update=deep), seed=7))
        same = [n for n in first if n in deeper and first[n].shape == deeper[n].shape]
        assert same and all(torch.equal(first[n], deeper[n]) for n in same)


def test_initial_weights_have_the_published_spread() -> None:
    wide = {"embedding_dim": 16, "bottom_mlp": (400, 300), "top_mlp": (300,)}
    dlrm = dense_parameters(built(ModelConfig(name="dlrm", **wide), 3))
    assert dlrm["bottom_mlp.2.weight"].std().item() == pytest.approx((2 / 700) ** 0.5, rel=0.02)
    assert dlrm["bottom_mlp.2.bias"].std().item() == pytest.approx((1 / 300) ** 0.5, rel=0.15)
    assert abs(dlrm["bottom_mlp.2.weight"].mean().item()) < 4 * (2 / 700) ** 0.5 / (400 * 300) ** 0.5
    dcn = dense_parameters(built(ModelConfig(name="dlrm_dcnv2", cross_low_rank=100, **wide), 3))
    assert dcn["cross.up.0.weight"].std().item() == pytest.approx((2 / (64 + 100)) ** 0.5, rel=0.03)
    assert dcn["cross.down.1.weight"].std().item() == pytest.approx((2 / (64 + 100)) ** 0.5, rel=0.03)
    assert not any(p.any() for name, p in dcn.items() if name.startswith("cross") and name.endswith("bias"))
    weight = dcn["bottom_mlp.2.weight"]
    assert weight.abs().max().item() == pytest.approx(400**-0.5, rel=0.001) and weight.abs().max() <= 400**-0.5
    assert weight.std().item() == pytest.approx((400 * 3) ** -0.5, rel=0.02)
    assert dcn["bottom_mlp.2.bias"].abs().max() <= 400**-0.5


@pytest.mark.parametrize("config", CONFIGS)
def test_state_holds_parameters_only(config: ModelConfig) -> None:
    model = built(config, 0)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert isinstance(model.embeddings, OneRowEach)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [config for config in CONFIGS if config.name not in {"fm", "logistic_regression"}])
def test_float32_and_bfloat16_stay_close_to_float64(config: ModelConfig, dtype: Any) -> None:
    dense = some_dense(300, 13).float()
    pooled = built(config, 0).embeddings(some_ids(3, 300)).pooled.values.detach()
    results = []
    for precision, name in ((torch.float64, "float32"), (torch.float32, dtype)):
        model = make_model(config, OneRowEach([config.table_width()] * 3), 13, 0, name).to(precision)
        leaf = pooled.to(precision).requires_grad_()
        logits = model.score(dense, leaf)
        logits.square().mean().backward()
        results.append(
            (logits.detach(), leaf.grad, *(p.grad for n, p in model.named_parameters() if "embeddings" not in n))
        )
        assert all(tensor.dtype == precision for tensor in results[-1])
    errors = [float((result - exact).norm() / exact.norm()) for exact, result in zip(*results, strict=True)]
    smallest, largest = (1e-9, 2e-6) if dtype == "float32" else (1e-4, 0.1)
    assert smallest < max(errors) < largest  # the precision asked for, neither more nor less


def refused(make: Any, *words: str) -> None:
    with pytest.raises(MesetaError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_widths_that_do_not_fit_are_named() -> None:
    mlps: Any = {"num_dense": 2, "bottom_mlp": (3, 4), "top_mlp": (3,)}
    refused(
        lambda: DLRM(OneRowEach([4, 5]), **mlps), "feature 'f1' has embedding_dim 5", "output width 4", "interaction="
    )
    assert DLRM(OneRowEach([4, 5]), interaction="none", **mlps)
    refused(lambda: LogisticRegression(OneRowEach([1, 2]), num_dense=2), "feature 'f1'", "embedding_dim=1")
    refused(lambda: DLRM(OneRowEach([4], pooling="none"), **mlps), "feature 'f0' has pooling 'none'", "'mean'")
    refused(lambda: DLRMDCNv2(OneRowEach([4], pooling="none"), **mlps), "feature 'f0' has pooling 'none'")
    apart = EmbeddingBagCollection(
        [TableSpec(name="t", num_embeddings=2, embedding_dim=4)],
        [FeatureSpec(name="a", table="t"), FeatureSpec(name="b", table="t", batch="users")],
    )
    refused(lambda: DLRM(apart, **mlps), "feature 'b' has batch 'users'", "remove `batch`")
    for model in (DLRM, DLRMDCNv2):
        refused(lambda m=model: m(OneRowEach([4]), **{**mlps, "bottom_mlp": ()}), "bottom_mlp is empty")
        refused(lambda m=model: m(OneRowEach([4]), **{**mlps, "top_mlp": (3, 0)}), "at least 1", "[3, 4, 3, 0]")
    refused(lambda: DLRMDCNv2(OneRowEach([4]), cross=(3, 0), **mlps), "cross", "[3, 0]")
    for model in (DeepFM, WideDeep):
        make = partial(model, num_dense=2, deep_mlp=(3,))
        refused(lambda m=make: m(OneRowEach([4, 5])), "feature 'f0' has embedding_dim 4", "embedding_dim=5")
        refused(lambda m=make: m(OneRowEach([1, 1])), "at least 2", "embedding_dim=2")
        refused(lambda m=make: m(OneRowEach([4]), deep_mlp=(0,)), "deep_mlp must be at least 1")
    refused(lambda: FM(OneRowEach([3, 1]), num_dense=2), "FM: feature 'f1' has embedding_dim 1", "embedding_dim=3")
    refused(lambda: AutoInt(OneRowEach([3, 2]), num_dense=2), "AutoInt: feature 'f1'", "embedding_dim=3")
    refused(lambda: AutoInt(OneRowEach([3]), num_dense=2, attention=(1, 0, 2)), "attention", "[1, 0, 2]")
    mmoe = partial(MMoE, OneRowEach([4]), num_dense=2, tower_mlp=())
    refused(lambda: mmoe(num_tasks=0, experts=[(3,)]), "num_tasks", "[0, 1]")
    refused(lambda: mmoe(num_tasks=2, experts=[]), "number of experts", "[2, 0]")
    refused(lambda: mmoe(num_tasks=2, experts=[(3,), (3, 2)]), "[[3], [3, 2]]", "all must have the same output width")


def test_several_labels_want_a_model_for_several() -> None:
    several = CONFIGS[-2]
    assert several.name == "mmoe"
    pooled = torch.zeros(3, 8)
    for labels, shape in ((("label",), (3,)), (("click", "buy"), (3, 2))):
        model = make_model(several, OneRowEach([4, 4]), 1, 0, labels=labels)
        assert model.score(torch.zeros(3, 1), pooled).shape == shape
    for config in CONFIGS:
        if config is not several:
            tables = OneRowEach([config.table_width()])
            make = partial(make_model, config, tables, 1, 0, labels=("click", "buy"))
            refused(make, repr(config.name), "2 (click, buy)", "data.labels=[click]", "mmoe")


@pytest.mark.parametrize("index", range(11))
def test_inputs_that_do_not_fit_are_named(index: int) -> None:
    model = small_models()[index]
    width = model.pooled_width
    refused(lambda: model.score(torch.zeros(3, 4), torch.zeros(3, width)), "4 dense inputs", "num_dense=2")
    refused(lambda: model.score(torch.zeros(3, 2), torch.zeros(3, width + 1)), f"{width + 1} columns", f"for {width}")
