"""DHEN: layers that are ensembles of interactions of several kinds (arXiv 2203.11014)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from meseta.comm import BatchSlice
from meseta.config.models.interactions import DHENConfig, Ensemble, Interaction
from meseta.jagged.shapes import Float
from meseta.models.attention import InteractingLayer
from meseta.models.base import ModelBuildArgs
from meseta.models.cross import FullCross
from meseta.models.fields import FieldMixer
from meseta.models.global_layers import LayerNorm
from meseta.models.interactions.vector_stack import VectorStack
from meseta.models.layers import MLPOptions, SkipInitLinear, check_widths
from meseta.ops.dot_interaction import dot_interaction
from meseta.ops.sums import repeat
from meseta.spec import MesetaError

KERNEL_SIZE = 3
"""Vectors, and elements of a vector, that a convolution sees at once."""


@dataclass(frozen=True, kw_only=True)
class DHENShape:
    """What the layers of a DHEN are made of; all are alike."""

    num_layers: int = 2
    interactions: Mapping[Interaction, int] = field(default_factory=lambda: {"dot": 16, "linear": 16})
    """Modules of a layer, and the vectors that each makes."""
    ensemble: Ensemble = "concat"
    """What is made of all modules: their vectors one under the other, added, or added with learned weights."""
    num_heads: int = 2
    """self_attention: heads."""
    num_channels: int = 4
    """convolution: output channels."""


class AttentionModule(nn.Module):
    """Vectors that have attended to each other, combined: W_m u with u a layer of `InteractingLayer`."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int, num_heads: int) -> None:
        super().__init__()
        self.attention = InteractingLayer(width, num_heads, width // num_heads)
        self.mix = FieldMixer(num_inputs, num_outputs)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        return cast(Tensor, self.mix(self.attention(fields)))


class CrossModule(nn.Module):
    """A cross layer of full rank over all vectors side by side, combined: W_m u with u = x * (W x + b) + x."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int) -> None:
        super().__init__()
        self.cross = FullCross(num_inputs * width, num_layers=1)
        self.mix = FieldMixer(num_inputs, num_outputs)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        return cast(Tensor, self.mix(self.cross(fields.flatten(1)).view_as(fields)))


class DotModule(nn.Module):
    """Dot products of all pairs of vectors, the first vector beside them as in DLRM: W u + b as vectors."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = SkipInitLinear(width + math.comb(num_inputs, 2), num_outputs * width)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        products = dot_interaction(fields[:, 0].contiguous(), fields[:, 1:].flatten(1))
        return cast(Tensor, self.linear(products)).unflatten(1, (-1, fields.shape[2]))


class ConvolutionModule(nn.Module):
    """A convolution over vectors and their elements, padded with zeros, all channels combined: W_m conv(X)."""

    def __init__(self, num_inputs: int, num_outputs: int, num_channels: int) -> None:
        super().__init__()
        self.kernel = SkipInitLinear(KERNEL_SIZE * KERNEL_SIZE, num_channels)
        self.mix = FieldMixer(num_channels * num_inputs, num_outputs)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        _, height, width = fields.shape
        around = functional.pad(fields, [KERNEL_SIZE // 2] * 4)
        seen = torch.stack(
            [around[:, i : i + height, j : j + width] for i in range(KERNEL_SIZE) for j in range(KERNEL_SIZE)], dim=3
        )
        channels = self.kernel(seen.flatten(0, 2)).unflatten(0, seen.shape[:3])  # [B, M, D, channels]
        return cast(Tensor, self.mix(channels.permute(0, 3, 1, 2).flatten(1, 2)))


def make_interaction(kind: Interaction, num_inputs: int, width: int, num_outputs: int, shape: DHENShape) -> nn.Module:
    """The module that makes [B, num_outputs, width] of [B, num_inputs, width]. Its weights are to be set."""
    match kind:
        case "self_attention":
            return AttentionModule(num_inputs, width, num_outputs, shape.num_heads)
        case "cross":
            return CrossModule(num_inputs, width, num_outputs)
        case "dot":
            return DotModule(num_inputs, width, num_outputs)
        case "convolution":
            return ConvolutionModule(num_inputs, num_outputs, shape.num_channels)
    return FieldMixer(num_inputs, num_outputs)


class DHENLayer(nn.Module):
    """A layer, arXiv 2203.11014, section 3.2, equations 1 and 2: Norm(Ensemble_i(module_i(X)) + ShortCut(X)).

    The shortcut is X, or W X where the number of vectors changes; the norm is over each vector. Learned weights of the
    ensemble start at one. Under `dense.sharding: fsdp` a layer is gathered as one.
    """

    def __init__(self, num_inputs: int, width: int, shape: DHENShape) -> None:
        super().__init__()
        outputs = list(shape.interactions.values())
        self.ensemble = shape.ensemble
        self.num_outputs = sum(outputs) if shape.ensemble == "concat" else outputs[0]
        self.interactions = nn.ModuleDict(
            {
                kind: make_interaction(kind, num_inputs, width, number, shape)
                for kind, number in shape.interactions.items()
            }
        )
        self.weights = nn.Parameter(torch.ones(len(outputs))) if shape.ensemble == "weighted" else None
        self.shortcut = None if num_inputs == self.num_outputs else FieldMixer(num_inputs, self.num_outputs)
        self.norm = LayerNorm(width)

    def forward(self, fields: Float[Tensor, "B M D"], batch: BatchSlice | None) -> Float[Tensor, "B L D"]:
        """Nothing here reads where the samples lie in `batch`."""
        made = [interaction(fields) for interaction in self.interactions.values()]
        shortcut = fields if self.shortcut is None else self.shortcut(fields)
        return cast(Tensor, self.norm(self._combine(made) + shortcut))

    def _combine(self, made: Sequence[Float[Tensor, "B _L D"]]) -> Float[Tensor, "B L D"]:
        if self.ensemble == "concat":
            return torch.cat(list(made), dim=1)
        stacked = torch.stack(list(made), dim=1)
        if self.weights is not None:
            stacked = stacked * repeat(self.weights, len(stacked))[..., None, None]
        return stacked.sum(dim=1)


class DHEN(VectorStack):
    """Deep and hierarchical ensemble network, arXiv 2203.11014, section 3.

        X_0 = MLP(dense), e_1, ..., e_F                     vectors of width d; no MLP where there are no dense inputs
        X_{n+1} = Norm(Ensemble_i(module_i(X_n)) + ShortCut(X_n))
        logit = MLP(vectors of the last layer side by side)

    Self-attention is AutoInt's layer, where the paper has a transformer's encoder layer. Matrices with n inputs and m
    outputs start from N(0, 2 / (m + n)), biases at zero.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        bottom_mlp: Sequence[int],
        shape: DHENShape,
        top_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Build on `embeddings`, a module with `tables` of one width and `features`.

        Args:
            embeddings: called with the sparse inputs, returns an object whose `pooled.values` is [B, F * D].
            num_dense: number of dense inputs.
            bottom_mlp: hidden widths of the MLP over dense inputs; the layer of the tables' width is added.
            shape: of the layers.
            top_mlp: hidden widths of the MLP over the last layer; the layer with the one output is added.
            options: of the MLPs; layers compute in the type of the embeddings.
            seed: key of the initial weights.

        Raises MesetaError for tables of several widths, modules whose vectors cannot be added, heads that do not divide
        the width, dot products of one vector, a width below 1, or a feature without pooling.
        """
        check_widths("DHEN", "bottom_mlp and top_mlp", [*bottom_mlp, *top_mlp])
        super().__init__(embeddings, num_dense=num_dense, bottom_mlp=bottom_mlp, options=options)
        _check_shape(shape, self.num_vectors, self.width)
        self.set_layers(
            shape.num_layers,
            lambda _, num_vectors: DHENLayer(num_vectors, self.width, shape),
            top_mlp=top_mlp,
            options=options,
            seed=seed,
        )


def _check_shape(shape: DHENShape, num_vectors: int, width: int) -> None:
    outputs = shape.interactions
    if not outputs:
        raise MesetaError("DHEN: interactions are empty; give at least one, such as {dot: 16}")
    counts = [shape.num_layers, *outputs.values(), shape.num_heads, shape.num_channels]
    check_widths("DHEN", "num_layers, interactions, num_heads and num_channels", counts)
    if shape.ensemble != "concat" and len(set(outputs.values())) > 1:
        each = ", ".join(f"{kind!r} {number}" for kind, number in outputs.items())
        raise MesetaError(
            f"DHEN: ensemble {shape.ensemble!r} adds the vectors of all interactions, which do not meet: {each}; give "
            "all one number, or take ensemble 'concat'"
        )
    if "self_attention" in outputs and width % shape.num_heads:
        raise MesetaError(
            f"DHEN: 'self_attention' has {shape.num_heads} heads, which do not divide vectors of width {width}; take "
            "heads that do, or another embedding_dim"
        )
    made = sum(outputs.values()) if shape.ensemble == "concat" else next(iter(outputs.values()))
    read = min(num_vectors, made) if shape.num_layers > 1 else num_vectors
    if "dot" in outputs and read < 2:
        raise MesetaError(
            "DHEN: 'dot' multiplies pairs of vectors, and a layer here reads one vector alone; give interactions more "
            "vectors, or leave 'dot' out"
        )


def make_dhen(config: DHENConfig, request: ModelBuildArgs) -> DHEN:
    """The model of a config."""
    return DHEN(
        request.embeddings,
        num_dense=request.num_dense,
        bottom_mlp=config.bottom_mlp,
        shape=DHENShape(
            num_layers=config.layers,
            interactions=config.interactions,
            ensemble=config.ensemble,
            num_heads=config.attention_heads,
            num_channels=config.convolution_channels,
        ),
        top_mlp=config.top_mlp,
        options=request.options,
        seed=request.seed,
    )
