"""Tests of cross networks, and models with them, against published code: equal weights, outputs and gradients.

published_vectors.py has run TorchRec 1.8, FuxiCTR 2.3 and DeepCTR-Torch 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meseta.embedding import EmbeddingBagCollection
from meseta.models import DLRMDCNv2
from meseta.models.interactions.deep_cross import CrossShape, DCNv2, make_cross
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, TableSpec

STORED = np.load(Path(__file__).with_name("published_vectors.npz"))
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
Tensors = Mapping[str, Tensor]
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def stored(case: str, kind: str, dtype: str = "") -> dict[str, Tensor]:
    """Return the tensors of a case by published name. `kind` is 'weight', 'input' or 'gradient'."""
    prefix = "/".join(filter(None, (case, dtype, f"{kind}.")))
    return {name.removeprefix(prefix): torch.from_numpy(STORED[name]) for name in STORED if name.startswith(prefix)}


def layers(published: Tensors, name: str) -> list[Tensor]:
    """Return `name` of each layer, from one tensor or from one tensor per layer."""
    if name in published:
        return list(published[name])
    return [published[key] for key in sorted(key for key in published if key.startswith(f"{name}."))]


def full(published: Tensors, weight: str, bias: str) -> dict[str, Tensor]:
    return {
        **{f"layers.{i}.weight": w for i, w in enumerate(layers(published, weight))},
        **{f"layers.{i}.bias": b.flatten() for i, b in enumerate(layers(published, bias))},
    }


def fuxictr_full(published: Tensors) -> dict[str, Tensor]:
    return {name.replace("cross_layers", "layers"): value for name, value in published.items()}


def low_rank(published: Tensors) -> dict[str, Tensor]:
    return {
        **{f"down.{i}.weight": v for i, v in enumerate(layers(published, "V_kernels"))},
        **{f"up.{i}.weight": w for i, w in enumerate(layers(published, "W_kernels"))},
        **{f"up.{i}.bias": b for i, b in enumerate(layers(published, "bias"))},
    }


def mixture(published: Tensors, suffix: str, gates: str, *, v_by_rows: bool) -> dict[str, Tensor]:
    """Concatenate U and V of all experts. Their gates are shared by all layers as 'gates'."""
    result = {f"inner.{i}": c for i, c in enumerate(layers(published, f"C_{suffix}"))}
    for i, v in enumerate(layers(published, f"V_{suffix}")):
        result[f"down.{i}.weight"] = (v if v_by_rows else v.transpose(1, 2)).flatten(0, 1)
    for i, u in enumerate(layers(published, f"U_{suffix}")):
        result[f"up.{i}.weight"] = u.transpose(0, 1).flatten(1)
    for i, b in enumerate(layers(published, "bias")):
        result[f"up.{i}.bias"] = b.flatten()
    if together := layers(published, gates):
        result["gates"] = torch.cat(together)
    return result


CROSSES: dict[str, Any] = {
    "torchrec full": (CrossShape(kind="full", num_layers=3), lambda t: full(t, "kernels", "bias")),
    "torchrec low_rank": (CrossShape(kind="low_rank", num_layers=2, low_rank=3), low_rank),
    "torchrec mixture": (
        CrossShape(kind="mixture", num_layers=2, low_rank=2, num_experts=3, activation="relu"),
        lambda t: mixture(t, "kernels", "gates", v_by_rows=True),
    ),
    "torchrec mixture of one": (
        CrossShape(kind="mixture", num_layers=2, low_rank=2, num_experts=1),
        lambda t: mixture(t, "kernels", "gates", v_by_rows=True),
    ),
    "fuxictr full": (CrossShape(kind="full", num_layers=3), fuxictr_full),
    "fuxictr mixture": (
        CrossShape(kind="mixture", num_layers=2, low_rank=2, num_experts=3),
        lambda t: mixture(t, "list", "gating", v_by_rows=False),
    ),
}


def give(module: nn.Module, values: Tensors) -> None:
    """Set all parameters. Gates shared by all layers are set in each layer."""
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            together = name.partition("gates.")[0] + "gates"
            if "gates." in name and together not in values:
                parameter.zero_()  # of one expert, whose gate is 1
            else:
                parameter.copy_(values[together if "gates." in name else name])


def check_gradients(module: nn.Module, values: Tensors, tolerance: float) -> None:
    parameters: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        key = name.partition("gates.")[0] + "gates" if "gates." in name else name
        parameters[key] = parameters.get(key, 0.0) + parameter.grad
    assert set(values) <= set(parameters)
    for name, value in values.items():
        torch.testing.assert_close(
            parameters[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@DTYPES
@pytest.mark.parametrize("case", CROSSES)
def test_cross_networks(case: str, dtype: str) -> None:
    (shape, ours), precision = CROSSES[case], getattr(torch, dtype)
    network = make_cross(6, shape).to(precision)
    give(network, ours(stored(case, "weight")))
    x = stored(case, "input")["x"].to(precision).requires_grad_()
    output, tolerance = network(x), TOLERANCE[dtype]
    np.testing.assert_allclose(output.detach(), STORED[f"{case}/{dtype}/output"], rtol=tolerance, atol=tolerance)
    output.backward(torch.from_numpy(STORED[f"{case}/cotangent"]).to(precision))
    gradients = stored(case, "gradient", dtype)
    torch.testing.assert_close(x.grad, gradients.pop("x"), rtol=tolerance, atol=tolerance)
    check_gradients(network, ours(gradients), tolerance)


def check_model(case: str, dtype: str, model: nn.Module, ours: Any, sparse: KeyedJaggedTensor) -> None:
    """Check outputs and the gradients of dense weights, dense inputs and rows."""
    precision, tolerance = getattr(torch, dtype), TOLERANCE[dtype]
    values = ours(stored(case, "weight"))
    rows = {name: values.pop(name) for name in sorted(values) if name.startswith("rows.")}
    gradients = ours(stored(case, "gradient", dtype))
    dense = stored(case, "input")["dense"].to(precision).requires_grad_()
    leaves = [value.to(precision).requires_grad_() for value in rows.values()]
    pooled = [
        nn.functional.embedding_bag(sparse[key].values, leaf, sparse[key].offsets[:-1], mode="sum")
        for leaf, key in zip(leaves, sparse.keys, strict=True)
    ]
    model.to(precision)
    give(dense_part(model), values)
    output = model.score(dense, torch.cat(pooled, dim=1))
    np.testing.assert_allclose(output.detach(), STORED[f"{case}/{dtype}/output"][:, 0], rtol=tolerance, atol=tolerance)
    output.backward(torch.from_numpy(STORED[f"{case}/cotangent"][:, 0]).to(precision))
    # TorchRec converts pooled rows, and so their gradients, to float32.
    of_rows = max(1e-7, tolerance) if case.startswith("torchrec") else tolerance
    for name, leaf in zip(rows, leaves, strict=True):
        torch.testing.assert_close(leaf.grad, gradients.pop(name), rtol=of_rows, atol=of_rows)
    expected = stored(case, "gradient", dtype)["dense"]
    torch.testing.assert_close(dense.grad, expected, rtol=tolerance, atol=tolerance)
    check_gradients(dense_part(model), gradients, tolerance)


def dense_part(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({name: child for name, child in model.named_children() if name != "embeddings"})


def collection(dim: int) -> EmbeddingBagCollection:
    tables = [TableSpec(name=f"t{i}", num_embeddings=5, embedding_dim=dim) for i in range(2)]
    return EmbeddingBagCollection(tables, [FeatureSpec(name=f"f{i}", table=f"t{i}") for i in range(2)])


@DTYPES
def test_dlrm_dcn(dtype: str) -> None:
    case = "torchrec DLRM_DCN"

    def ours(published: Tensors) -> dict[str, Tensor]:
        bags, crossnet = "sparse_arch.embedding_bag_collection.embedding_bags", "inter_arch.crossnet."
        inner = {name.removeprefix(crossnet): v for name, v in published.items() if name.startswith(crossnet)}
        places = {f"rows.{i}": f"{bags}.t{i}.weight" for i in range(2)}
        for kind in ("weight", "bias"):
            for i in range(2):
                places[f"bottom_mlp.{2 * i}.{kind}"] = f"dense_arch.model._mlp.{i}._linear.{kind}"
            places[f"top_mlp.0.{kind}"] = f"over_arch.model.0._mlp.0._linear.{kind}"
            places[f"top_mlp.2.{kind}"] = f"over_arch.model.1.{kind}"
        return {
            **{name: published[place] for name, place in places.items()},
            **{f"cross.{name}": value for name, value in low_rank(inner).items()},
        }

    model = DLRMDCNv2(collection(3), num_dense=4, bottom_mlp=(5, 3), top_mlp=(4,), cross=(2, 2))
    ids, lengths = (torch.from_numpy(STORED[f"{case}/{name}"]) for name in ("ids", "lengths"))
    check_model(case, dtype, model, ours, KeyedJaggedTensor(keys=("f0", "f1"), values=ids, lengths=lengths))


ORDER = [6, 7, 0, 1, 2, 3, 4, 5]
"""Index of each of our input columns in DeepCTR's order, in which dense inputs are last."""


@DTYPES
@pytest.mark.parametrize("case", ["deepctr DCN", "deepctr DCNMix"])
def test_dcn_v2_in_parallel(case: str, dtype: str) -> None:
    mixed = case == "deepctr DCNMix"

    def ours(published: Tensors) -> dict[str, Tensor]:
        inner = {n.removeprefix("crossnet."): v for n, v in published.items() if n.startswith("crossnet.")}
        if mixed:
            cross = mixture(inner, "list", "gating", v_by_rows=False)
        else:
            cross = full(inner, "kernels", "bias")
            cross |= {name: value[:, ORDER] for name, value in cross.items() if name.endswith("weight")}
        for name, value in cross.items():
            if name.startswith(("gates", "down")):
                cross[name] = value[:, ORDER]
            elif not name.startswith("inner"):
                cross[name] = value[ORDER]
        return {
            **{f"rows.{i}": published[f"embedding_dict.f{i}.weight"] for i in range(2)},
            **{f"cross.{name}": value for name, value in cross.items()},
            "deep_mlp.0.weight": published["dnn.linears.0.weight"][:, ORDER],
            "deep_mlp.0.bias": published["dnn.linears.0.bias"],
            "deep_mlp.2.weight": published["dnn.linears.1.weight"],
            "deep_mlp.2.bias": published["dnn.linears.1.bias"],
            "head.weight": published["dnn_linear.weight"][:, [*ORDER, 8, 9, 10, 11]],
            "head.bias": published["out.bias"],
        }

    shape = CrossShape(kind="mixture" if mixed else "full", num_layers=2, low_rank=2, num_experts=3)
    model = DCNv2(collection(3), num_dense=2, cross=shape, structure="parallel", deep_mlp=(5, 4))
    ids = torch.from_numpy(STORED[f"{case}/ids"])
    sparse = KeyedJaggedTensor(keys=("f0", "f1"), values=ids.t().flatten(), lengths=torch.ones(8, dtype=torch.int64))
    check_model(case, dtype, model, ours, sparse)
