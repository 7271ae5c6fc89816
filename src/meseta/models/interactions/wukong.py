"""Base class of Wukong and DHEN: stacked layers over vectors of equal width, and an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.config.models.interactions import WukongConfig
from meseta.models.global_layers import LayerNorm
from meseta.models.layers import (
    MLP,
    DenseVector,
    FieldMixer,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    check_widths,
    common_width,
    fill_linear,
)
from meseta.ops.product import batched_product
from meseta.sparse.shapes import Float


class VectorStack(ScoringModel):
    """Stack of layers that map vectors of width d to vectors of width d.

    X_0 = MLP(dense), e_1, ..., e_F          no MLP without dense inputs
    X_{i+1} = layer_i(X_i)
    logit = MLP(concat of the last layer's vectors)
    """

    def __init__(
        self, embeddings: nn.Module, *, num_dense: int, bottom_mlp: Sequence[int], options: MLPOptions | None
    ) -> None:
        """Create the part below the layers. `bottom_mlp` has the hidden widths of the MLP over dense inputs."""
        super().__init__(embeddings, num_dense)
        self.width = common_width(type(self).__name__, self.dims)
        self.bottom = DenseVector(num_dense, bottom_mlp, self.width, options, "bottom")
        # Number of vectors that the first layer reads.
        self.num_vectors = self.bottom.num_vectors + len(self.dims)

    def set_layers(
        self,
        num_layers: int,
        make_layer: Callable[[int, int], Any],
        *,
        top_mlp: Sequence[int],
        options: MLPOptions | None,
        seed: int,
    ) -> None:
        """Create the layers and the top MLP, and initialize all weights.

        `make_layer(index, num_vectors)` creates a layer that reads `num_vectors` vectors: a module with `num_outputs`,
        called with vectors [B, N, d] and the `BatchSlice` of the samples.
        """
        layers, num_vectors = [], self.num_vectors
        for index in range(num_layers):
            layers.append(make_layer(index, num_vectors))
            num_vectors = layers[-1].num_outputs
        self.layers = nn.ModuleList(layers)
        self.top_mlp = MLP([num_vectors * self.width, *top_mlp, 1], relu_last=False, options=options, name="top_mlp")
        # Weights from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_linear(self, seed)

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        return cast(Tensor, self.bottom(dense, self.batch_slice))

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        fields = torch.cat([x, pooled.unflatten(1, (-1, self.width))], dim=1)
        for layer in self.layers:
            fields = layer(fields, self.batch_slice)
        return cast(Tensor, self.top_mlp(fields.flatten(1), self.batch_slice)).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class WukongShape:
    """Shape of every layer of a Wukong."""

    num_layers: int = 3
    fm_vectors: int = 16
    """Number of vectors from the factorization machine block, n_F."""
    linear_vectors: int = 16
    """Number of vectors from the linear compression block, n_L."""
    rank: int = 24
    """Number of columns of the projection Y, k."""
    fm_mlp: Sequence[int] = (256,)
    """Hidden widths of the MLP in the factorization machine block."""


class FactorizationMachineBlock(nn.Module):
    """Factorization machine block (FMB): reshape(MLP(LN(flatten(X X^T Y)))), n_F vectors of width d.

    Y [n, k] is a learned projection. Source: arXiv 2403.02545, sections 3.3 and 3.5.
    """

    def __init__(self, num_inputs: int, width: int, shape: WukongShape, options: MLPOptions | None, name: str) -> None:
        super().__init__()
        self.projection = FieldMixer(num_inputs, shape.rank)
        self.norm = LayerNorm(num_inputs * shape.rank)
        widths = [num_inputs * shape.rank, *shape.fm_mlp, shape.fm_vectors * width]
        self.mlp = MLP(widths, relu_last=False, options=options, name=f"{name}.mlp")

    def forward(self, fields: Float[Tensor, "B N D"], batch: BatchSlice | None) -> Float[Tensor, "B n_F D"]:
        # X (X^T Y) takes n d k operations, while X X^T would take n^2 d.
        products = batched_product(fields, self.projection.mix_columns(fields))
        made = self.mlp(self.norm(products.flatten(1)), batch)
        return cast(Tensor, made).to(fields.dtype).unflatten(1, (-1, fields.shape[2]))


class WukongLayer(nn.Module):
    """Layer of a Wukong (arXiv 2403.02545, section 3.2): X_{i+1} = LN(concat(FMB(X_i), W_L X_i) + X_i).

    If the number of vectors changes, another learned matrix compresses X_i in the sum. LN is over each vector.
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
    """Wukong (arXiv 2403.02545, section 3): a `VectorStack` of `WukongLayer`."""

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
        """Create the model on `embeddings`, see `ScoringModel`.

        `bottom_mlp` has the hidden widths of the MLP over dense inputs, followed by a layer with the width of the
        tables, and `top_mlp` those of the MLP over the last layer. All other parts compute in the type of the
        embeddings.

        Raises MesetaError if tables have different widths or a width is below 1.
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
    """Build Wukong from its config."""
    return request.build(
        Wukong,
        bottom_mlp=config.bottom_mlp,
        shape=WukongShape(
            num_layers=config.layers,
            fm_vectors=config.fm_vectors,
            linear_vectors=config.linear_vectors,
            rank=config.fm_rank,
            fm_mlp=config.fm_mlp,
        ),
        top_mlp=config.top_mlp,
    )
