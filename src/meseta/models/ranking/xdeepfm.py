"""xDeepFM: sum of a linear part, a compressed interaction network and an MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meseta.config.models.classic import XDeepFMConfig
from meseta.models.layers import (
    MLP,
    FieldVectors,
    FirstOrderTerm,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    common_width,
    fill_glorot,
    fill_normal,
    split_weights,
)
from meseta.ops.product import product
from meseta.sparse.shapes import Float

MAX_CHUNK_ELEMENTS = 1 << 19
"""Maximum number of products or sums of a layer to compute at a time, 2 MiB in float32."""
MIN_CHUNK_SAMPLES = 16
"""Minimum number of samples to compute at a time, for wide layers."""


class CompressedInteraction(nn.Module):
    """Compressed interaction network (CIN) without activation (arXiv 1803.05170, section 3.1, equations 6 and 8)."""

    def __init__(self, num_fields: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs = [num_fields, *widths]
        self.weights = nn.ParameterList(
            torch.empty(outputs, before * num_fields) for before, outputs in zip(inputs, widths, strict=False)
        )

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B sum_of_H"]:
        """Return the sums over the D elements of every vector of all layers, concatenated."""
        # X^k_h = sum_{i,j} W^{k,h}_{ij} X^{k-1}_i * X^0_j with vectors X_h of width D and the element-wise product *.
        # p^k_h = sum over the D elements of X^k_h.
        first = x = fields.transpose(1, 2).contiguous()
        sums = []
        for weight in self.weights:
            x = cin_layer(x, first, weight)
            sums.append(x.sum(dim=1))
        return torch.cat(sums, dim=1)


def cin_layer(
    x: Float[Tensor, "B D H"], first: Float[Tensor, "B D M"], weight: Float[Tensor, "outputs H_times_M"]
) -> Float[Tensor, "B D outputs"]:
    """Compute a layer of a CIN in the type of `x`: out_o = sum_ij W_o,ij (x_i * first_j). Differentiable once."""
    if torch.compiler.is_exporting():
        return (_products(x, first) @ weight.to(x.dtype).t()).view(*x.shape[:2], len(weight))
    result: Tensor = _CINLayerFunction.apply(x, first, weight)
    return result


# The backward pass computes the array again. On a CPU both passes process a few samples at a time, so that it fits in
# the processor's cache.
class _CINLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, weight)
        outputs, matrix = x.new_empty(*x.shape[:2], len(weight)), weight.to(x.dtype)
        compress_some, _ = _select_method(first, weight)
        for some in _sample_chunks(x, first, weight):
            outputs[some] = compress_some(x[some], first[some], matrix)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, first, weight = ctx.saved_tensors
        of_x, of_first, matrix = torch.empty_like(x), torch.empty_like(first), weight.to(x.dtype)
        of_weight = torch.zeros_like(matrix)
        _, way_back = _select_method(first, weight)
        for some in _sample_chunks(x, first, weight):
            of_x[some], of_first[some], part = way_back(gradient[some], x[some], first[some], matrix)
            of_weight += part
        return of_x, of_first, of_weight.to(weight.dtype)


def _select_method(first: Tensor, weight: Tensor) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, ...]]]:
    # The method with the smaller array: all sums over j, [B, D, outputs H], or all products, [B, D, H M].
    if len(weight) < first.shape[2]:
        return _sums_first, _sums_first_backward
    return _products_first, _products_first_backward


def _sample_chunks(x: Tensor, first: Tensor, weight: Tensor) -> list[slice]:
    num_samples = at_a_time = len(x)
    if x.device.type in {"cpu", "meta"}:
        # Large arrays on a CPU would not fit in the processor's cache.
        of_sample = math.prod(x.shape[1:]) * min(len(weight), first.shape[2])
        at_a_time = max(MIN_CHUNK_SAMPLES, MAX_CHUNK_ELEMENTS // of_sample)
    return [slice(start, start + at_a_time) for start in range(0, num_samples, max(at_a_time, 1))]


def _products_first(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    # All products x_i * first_j, reduced by one matrix product.
    return product(_products(x, first), weight.t()).view(*x.shape[:2], len(weight))


def _products(x: Tensor, first: Tensor) -> Float[Tensor, "B_times_D H_times_M"]:
    return (x[..., None] * first[:, :, None, :]).flatten(2).flatten(0, 1)


def _products_first_backward(
    gradient: Tensor, x: Tensor, first: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    flat = gradient.flatten(0, 1)
    of_weight = product(flat.t(), _products(x, first))
    of_products = product(flat, weight).view(*x.shape, first.shape[2])
    return (of_products * first[:, :, None, :]).sum(dim=3), (of_products * x[..., None]).sum(dim=2), of_weight


def _sums_first(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    # Sums over j, each multiplied by its x_i.
    return (_sums(x, first, weight) * x[:, :, None, :]).sum(dim=3)


def _sums(x: Tensor, first: Tensor, weight: Tensor) -> Float[Tensor, "B D outputs H"]:
    matrix = weight.view(-1, first.shape[2])  # [outputs * H, M]
    return product(first.flatten(0, 1), matrix.t()).view(*x.shape[:2], len(weight), x.shape[2])


def _sums_first_backward(gradient: Tensor, x: Tensor, first: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_x = (_sums(x, first, weight) * gradient[..., None]).sum(dim=2)
    of_sums = (gradient[..., None] * x[:, :, None, :]).flatten(2).flatten(0, 1)  # [B * D, outputs * H]
    of_first = product(of_sums, weight.view(-1, first.shape[2])).view_as(first)
    return of_x, of_first, product(of_sums.t(), first.flatten(0, 1)).view_as(weight)


class XDeepFM(ScoringModel):
    """xDeepFM (arXiv 1803.05170, section 3.2, equation 9).

        logit = w_0 + sum_i w_i x_i + w_cin . CIN(fields) + MLP(concat(fields))

    Fields are x_m v_m for dense inputs and pooled rows for features. The row of an id is (v_1, ..., v_D, w), so tables
    have D + 1 columns as for `FM`. The CIN is computed in the type of the embeddings.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        cin_layers: Sequence[int],
        deep_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model on `embeddings`, whose tables must all have width D + 1 >= 2. See `ScoringModel`.

        `cin_layers` has the number of rows H_k of each CIN layer, (200, 200, 200) in the paper. `deep_mlp` has the
        hidden widths of the MLP.

        Raises MesetaError if a width is invalid.
        """
        super().__init__(embeddings, num_dense)
        check_widths("XDeepFM", "cin_layers and deep_mlp", [*cin_layers, *deep_mlp])
        width = common_width("XDeepFM", self.dims, min_width=2) - 1
        # For dense inputs, w is initialized with zeros, and v from N(0, 0.1 squared).
        self.first_order = FirstOrderTerm(num_dense)
        self.fields = FieldVectors(num_dense, len(self.dims), width, seed)
        self.cin = CompressedInteraction(self.fields.num_fields, cin_layers)
        self.cin_head = SkipInitLinear(sum(cin_layers), 1, bias=False)
        widths = [self.fields.num_fields * width, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=options, name="deep_mlp")
        # Matrices from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_glorot(self.deep_mlp, seed)
        for name, weight in (*self.cin.named_parameters(prefix="cin"), ("cin_head", self.cin_head.weight)):
            fill_normal(weight, math.sqrt(2.0 / sum(weight.shape)), seed, name)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> tuple[Tensor, Tensor]:
        """Return (weighted sum of the dense inputs, their vectors)."""
        return self.first_order(dense), self.fields(dense)

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, of_dense = x
        fields = torch.cat([of_dense, vectors], dim=1)
        # Only the MLP computes in the type of `options`.
        linear = weighted + weights.sum(dim=1) + self.cin_head(self.cin(fields)).squeeze(1)
        return linear + self.deep_mlp(fields.flatten(1), self.batch_slice).squeeze(1)


def make_xdeepfm(config: XDeepFMConfig, request: ModelBuildArgs) -> XDeepFM:
    """Build xDeepFM from its config."""
    return request.build(
        XDeepFM,
        cin_layers=config.cin_layers,
        deep_mlp=config.deep_mlp,
    )
