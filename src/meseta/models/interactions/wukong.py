"""Wukong: stacked layers of factorization machines and linear compression (arXiv 2403.02545)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.config.models.interactions import WukongConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs
from meseta.models.fields import FieldMixer
from meseta.models.global_layers import LayerNorm
from meseta.models.interactions.vector_stack import VectorStack
from meseta.models.layers import MLP, MLPOptions, check_widths
from meseta.ops.product import batched_product


@dataclass(frozen=True, kw_only=True)
class WukongShape:
    """What the layers of a Wukong are made of; all are alike."""

    num_layers: int = 3
    fm_vectors: int = 16
    """n_F, vectors that the factorization machine block of a layer makes."""
    linear_vectors: int = 16
    """n_L, vectors that its linear compression block makes."""
    rank: int = 24
    """k, columns of the projection Y."""
    fm_mlp: Sequence[int] = (256,)
    """Hidden widths of the MLP of the factorization machine block."""


class FactorizationMachineBlock(nn.Module):
    """FMB, arXiv 2403.02545, sections 3.3 and 3.5: reshape(MLP(LN(flatten(X X^T Y)))), n_F vectors of width d.

    Y [n, k] is learned; X (X^T Y) takes n d k operations where X X^T would take n^2 d.
    """

    def __init__(self, num_inputs: int, width: int, shape: WukongShape, options: MLPOptions | None, name: str) -> None:
        super().__init__()
        self.projection = FieldMixer(num_inputs, shape.rank)
        self.norm = LayerNorm(num_inputs * shape.rank)
        widths = [num_inputs * shape.rank, *shape.fm_mlp, shape.fm_vectors * width]
        self.mlp = MLP(widths, relu_last=False, options=options, name=f"{name}.mlp")

    def forward(self, fields: Float[Tensor, "B N D"], batch: BatchSlice | None) -> Float[Tensor, "B n_F D"]:
        products = batched_product(fields, self.projection.mix_columns(fields))
        made = self.mlp(self.norm(products.flatten(1)), batch)
        return cast(Tensor, made).to(fields.dtype).unflatten(1, (-1, fields.shape[2]))


class WukongLayer(nn.Module):
    """A layer, arXiv 2403.02545, section 3.2: X_{i+1} = LN(FMB(X_i) and W_L X_i, one under the other, + X_i).

    Where the number of vectors changes, X_i is compressed to it by a matrix of its own. LN is over each vector.
    """

    def __init__(self, num_inputs: int, width: int, shape: WukongShape, options: MLPOptions | None, name: str) -> None:
        super().__init__()
        self.num_outputs = shape.fm_vectors + shape.linear_vectors
        self.fm_block = FactorizationMachineBlock(num_inputs, width, shape, options, f"{name}.fm_block")
        self.linear_block = FieldMixer(num_inputs, shape.linear_vectors)
        self.residual = None if num_inputs == self.num_outputs else FieldMixer(num_inputs, self.num_outputs)
        self.norm = LayerNorm(width)

    def forward(self, fields: Float[Tensor, "B N D"], batch: BatchSlice | None) -> Float[Tensor, "B outputs D"]:
        made = torch.cat([self.fm_block(fields, batch), self.linear_block(fields)], dim=1)
        return cast(Tensor, self.norm(made + (fields if self.residual is None else self.residual(fields))))


class Wukong(VectorStack):
    """Wukong, arXiv 2403.02545, section 3.

        X_0 = MLP(dense), e_1, ..., e_F                     vectors of width d; no MLP where there are no dense inputs
        X_{i+1} = LN(concat(FMB(X_i), LCB(X_i)) + X_i)      layers
        logit = MLP(vectors of the last layer side by side)

    Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases at zero.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        bottom_mlp: Sequence[int],
        shape: WukongShape,
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
            options: of the MLPs; the rest computes in the type of the embeddings.
            seed: key of the initial weights.

        Raises MesetaError for tables of several widths, a width below 1, or a feature without pooling.
        """
        check_widths("Wukong", "bottom_mlp, top_mlp and fm_mlp", [*bottom_mlp, *top_mlp, *shape.fm_mlp])
        counts = [shape.num_layers, shape.fm_vectors, shape.linear_vectors, shape.rank]
        check_widths("Wukong", "num_layers, fm_vectors, linear_vectors and rank", counts)
        super().__init__(embeddings, num_dense=num_dense, bottom_mlp=bottom_mlp, options=options)
        self.set_layers(
            shape.num_layers,
            lambda index, num_vectors: WukongLayer(num_vectors, self.width, shape, options, f"layers.{index}"),
            top_mlp=top_mlp,
            options=options,
            seed=seed,
        )


def make_wukong(config: WukongConfig, request: ModelBuildArgs) -> Wukong:
    """The model of a config."""
    return Wukong(
        request.embeddings,
        num_dense=request.num_dense,
        bottom_mlp=config.bottom_mlp,
        shape=WukongShape(
            num_layers=config.layers,
            fm_vectors=config.fm_vectors,
            linear_vectors=config.linear_vectors,
            rank=config.fm_rank,
            fm_mlp=config.fm_mlp,
        ),
        top_mlp=config.top_mlp,
        options=request.options,
        seed=request.seed,
    )
