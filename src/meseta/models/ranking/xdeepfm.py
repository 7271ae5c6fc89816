"""xDeepFM: a compressed interaction network beside a linear part and an MLP (arXiv 1803.05170)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meseta.config.models.classic import XDeepFMConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelRequest, ScoringModel
from meseta.models.fields import Fields, FirstOrder, equal_width, split_weights
from meseta.models.initial import fill_normal
from meseta.models.layers import MLP, BlankLinear, MLPOptions, check_widths, fill_glorot
from meseta.ops.mlp import mlp

CACHED_NUMBERS = 1 << 19
"""Of a layer's products or sums at a time: 2 MiB in float32."""
MIN_SAMPLES = 16
"""At a time, however wide the layer is."""


class CompressedInteraction(nn.Module):
    """Compressed interaction network (CIN), arXiv 1803.05170, section 3.1, equations 6 and 8; no activation.

        X^k_h = sum_{i,j} W^{k,h}_{ij} X^{k-1}_i * X^0_j      rows X_h are vectors of width D, * is by element
        p^k_h = sum over the D elements of X^k_h

    Either all products are made first, [B, D, H_{k-1} M] numbers, or all sums over j, [B, D, H_k H_{k-1}] numbers,
    whichever is less. These are made again on the way back; on a CPU for some samples at a time, so that they stay in
    its cache.
    """

    def __init__(self, num_fields: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs = [num_fields, *widths]
        self.weights = nn.ParameterList(
            torch.empty(outputs, before * num_fields) for before, outputs in zip(inputs, widths, strict=False)
        )

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B sum_of_H"]:
        """p of all layers, side by side."""
        first = x = fields.transpose(1, 2)
        sums = []
        for weight in self.weights:
            x = _compress(x, first, weight)
            sums.append(x.sum(dim=1))
        return torch.cat(sums, dim=1)


def _compress(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    """One layer: x [B, D, H], first [B, D, M], weight [outputs, H * M] -> [B, D, outputs]."""
    num_outputs, num_fields = len(weight), first.shape[2]
    compress = _sums_first if num_outputs < num_fields else _products_first
    num_samples = len(x)
    if x.device.type in {"cpu", "meta"} and not torch.compiler.is_exporting():
        of_sample = math.prod(x.shape[1:]) * min(num_outputs, num_fields)
        num_samples = max(MIN_SAMPLES, CACHED_NUMBERS // of_sample)
    return torch.cat(
        [
            checkpoint(compress, *parts, weight, use_reentrant=False, preserve_rng_state=False)
            for parts in zip(x.split(num_samples), first.split(num_samples), strict=True)
        ]
    )


def _products_first(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    """sum_ij W_ij (x_i * first_j)."""
    products = (x[..., None] * first[:, :, None, :]).flatten(2).flatten(0, 1)
    return mlp(products, [weight], [None], relu_last=False).view(*x.shape[:2], len(weight))


def _sums_first(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
    """sum_i x_i * (sum_j W_ij first_j)."""
    matrix = weight.view(-1, first.shape[2])  # [outputs * H, M]
    sums = mlp(first.flatten(0, 1), [matrix], [None], relu_last=False)
    return (sums.view(*x.shape[:2], len(weight), x.shape[2]) * x[:, :, None, :]).sum(dim=3)


class XDeepFM(ScoringModel):
    """xDeepFM, arXiv 1803.05170, section 3.2, equation 9.

        logit = w_0 + sum_i w_i x_i + w_cin . CIN(fields) + MLP(fields side by side)

    Fields are x_m v_m of dense inputs and pooled rows of features. The row of an id is (v_1, ..., v_D, w): tables have
    D + 1 columns as for FM. Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases and the w of
    dense inputs at zero, vectors of dense inputs from N(0, 0.1 squared). CIN is computed in the type of the embeddings.
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
        """Build on `embeddings`, a module with `tables` of one width D + 1 >= 2 and `features`.

        `cin_layers` are the rows H_k of the CIN's layers, (200, 200, 200) in the paper; `deep_mlp` the hidden widths of
        the MLP, whose layer with the one output is added. Raises MesetaError for tables of other widths, a feature
        without pooling, or a width below 1.
        """
        super().__init__(embeddings, num_dense)
        check_widths("XDeepFM", "cin_layers and deep_mlp", [*cin_layers, *deep_mlp])
        width = equal_width("XDeepFM", self.dims, at_least=2) - 1
        self.first_order = FirstOrder(num_dense)
        self.fields = Fields(num_dense, len(self.dims), width, seed)
        self.cin = CompressedInteraction(self.fields.num_fields, cin_layers)
        self.cin_head = BlankLinear(sum(cin_layers), 1, bias=False)
        widths = [self.fields.num_fields * width, *deep_mlp, 1]
        self.deep_mlp = MLP(widths, relu_last=False, options=options, name="deep_mlp")
        fill_glorot(self.deep_mlp, seed)
        for name, weight in (*self.cin.named_parameters(prefix="cin"), ("cin_head", self.cin_head.weight)):
            fill_normal(weight, math.sqrt(2.0 / sum(weight.shape)), seed, name)

    def of_dense(self, dense: Float[Tensor, "B num_dense"]) -> tuple[Tensor, Tensor]:
        """Their weighted sum, and their vectors."""
        return self.first_order(dense), self.fields(dense)

    def logits(self, x: tuple[Tensor, Tensor], pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The sum above; the MLP in the type of `options`, the rest in that of the embeddings."""
        vectors, weights = split_weights(pooled, len(self.dims))
        weighted, of_dense = x
        fields = torch.cat([of_dense, vectors], dim=1)
        linear = weighted + weights.sum(dim=1) + self.cin_head(self.cin(fields)).squeeze(1)
        return linear + self.deep_mlp(fields.flatten(1), self.batch_slice).squeeze(1)


def make_xdeepfm(config: XDeepFMConfig, request: ModelRequest) -> XDeepFM:
    """The model of a config."""
    return XDeepFM(
        request.embeddings,
        num_dense=request.num_dense,
        cin_layers=config.cin_layers,
        deep_mlp=config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )
