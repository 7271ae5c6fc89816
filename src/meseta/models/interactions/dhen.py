"""DHEN: layers that are ensembles of several kinds of interactions."""

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
from meseta.models.global_layers import LayerNorm
from meseta.models.interactions.deep_cross import FullCross
from meseta.models.interactions.wukong import VectorStack
from meseta.models.layers import FieldMixer, InteractingLayer, MLPOptions, ModelBuildArgs, SkipInitLinear, check_widths
from meseta.ops.common import repeat
from meseta.ops.dot_interaction import dot_interaction
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError

KERNEL_SIZE = 3
"""Height and width of the convolution kernel, in vectors and in elements of a vector."""


@dataclass(frozen=True, kw_only=True)
class DHENShape:
    """Shape of every layer of a DHEN."""

    num_layers: int = 2
    interactions: Mapping[Interaction, int] = field(default_factory=lambda: {"dot": 16, "linear": 16})
    """Number of vectors that each interaction module of a layer computes, by kind."""
    ensemble: Ensemble = "concat"
    """Combination of the modules' vectors: concatenated, summed, or summed with learned weights."""
    num_heads: int = 2
    """Number of heads of `self_attention`."""
    num_channels: int = 4
    """Number of output channels of `convolution`."""


class AttentionModule(nn.Module):
    """Interaction by self-attention: linear combinations W_m u of u, the output of an `InteractingLayer`."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int, num_heads: int) -> None:
        super().__init__()
        self.attention = InteractingLayer(width, num_heads, width // num_heads)
        self.mix = FieldMixer(num_inputs, num_outputs)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        return cast(Tensor, self.mix(self.attention(fields)))


class CrossModule(nn.Module):
    """Interaction by a full-rank cross layer: linear combinations W_m u of u = x * (W x + b) + x for concatenated
    vectors x."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int) -> None:
        super().__init__()
        self.cross = FullCross(num_inputs * width, num_layers=1)
        self.mix = FieldMixer(num_inputs, num_outputs)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        return cast(Tensor, self.mix(self.cross(fields.flatten(1)).view_as(fields)))


class DotModule(nn.Module):
    """Interaction by dot products of all pairs of vectors: W u + b, where u also contains the first vector, as in
    DLRM."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = SkipInitLinear(width + math.comb(num_inputs, 2), num_outputs * width)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        products = dot_interaction(fields[:, 0].contiguous(), fields[:, 1:].flatten(1))
        return cast(Tensor, self.linear(products)).unflatten(1, (-1, fields.shape[2]))


class ConvolutionModule(nn.Module):
    """Interaction by a zero-padded convolution over vectors and elements: linear combinations of all channels."""

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
    """Create the module from [B, num_inputs, width] to [B, num_outputs, width]. The caller initializes its weights."""
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
    """Layer of a DHEN (arXiv 2203.11014, section 3.2, equations 1 and 2): Norm(Ensemble_i(module_i(X)) + ShortCut(X)).

    The shortcut is X, or W X if the number of vectors changes. The norm is over each vector. Under `dense.sharding:
    fsdp`, a layer is gathered as one unit.
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
        # `VectorStack` calls its layers with `batch`, which only those with dropout or batch norm need.
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
    """Deep and hierarchical ensemble network (arXiv 2203.11014, section 3): a `VectorStack` of `DHENLayer`.

    Self-attention is the layer of AutoInt, while the paper uses the encoder layer of a transformer.
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
        """Create the model on `embeddings`, see `ScoringModel`, with the MLPs of `Wukong`. Layers compute in the type
        of the embeddings.

        Raises MesetaError if tables have different widths, vectors of modules cannot be summed, heads do not divide the
        width, dot products have only one vector, or a width is below 1.
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
        raise MesetaError("DHEN: interactions must not be empty; set at least one, such as {dot: 16}")
    counts = [shape.num_layers, *outputs.values(), shape.num_heads, shape.num_channels]
    check_widths("DHEN", "num_layers, interactions, num_heads and num_channels", counts)
    if shape.ensemble != "concat" and len(set(outputs.values())) > 1:
        each = ", ".join(f"{kind!r} {number}" for kind, number in outputs.items())
        raise MesetaError(
            f"DHEN: with ensemble {shape.ensemble!r}, all interactions must have the same number of vectors, got "
            f"{each}; make them equal, or choose ensemble 'concat'"
        )
    if "self_attention" in outputs and width % shape.num_heads:
        raise MesetaError(
            f"DHEN: the {shape.num_heads} heads of 'self_attention' must divide embedding_dim, got {width}; change the "
            "number of heads, or embedding_dim"
        )
    made = sum(outputs.values()) if shape.ensemble == "concat" else next(iter(outputs.values()))
    read = min(num_vectors, made) if shape.num_layers > 1 else num_vectors
    if "dot" in outputs and read < 2:
        raise MesetaError(
            "DHEN: 'dot' requires layers with at least two input vectors, but a layer has only one; give interactions "
            "more vectors, or remove 'dot'"
        )


def make_dhen(config: DHENConfig, request: ModelBuildArgs) -> DHEN:
    """Build DHEN from its config."""
    return request.build(
        DHEN,
        bottom_mlp=config.bottom_mlp,
        shape=DHENShape(
            num_layers=config.layers,
            interactions=config.interactions,
            ensemble=config.ensemble,
            num_heads=config.attention_heads,
            num_channels=config.convolution_channels,
        ),
        top_mlp=config.top_mlp,
    )
