"""Fields: every dense input and every sparse feature as a vector of one width, with a weight of its own in a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.jagged.shapes import Float
from meseta.models.initialization import fill_normal
from meseta.models.layers import MLP, MLPOptions, SkipInitLinear
from meseta.ops.sums import repeat
from meseta.spec import MesetaError

INITIAL_STD = 0.1
"""Spread of the vectors of dense inputs at the start, as in libFM."""


class FieldVectors(nn.Module):
    """The vectors of all fields: dense input j is x_j v_j with a learned v_j, a sparse feature its pooled rows."""

    def __init__(self, num_dense: int, num_sparse: int, width: int, seed: int) -> None:
        super().__init__()
        self.num_sparse = num_sparse
        self.num_fields = num_dense + num_sparse
        self.width = width
        self.dense_vectors = nn.Parameter(torch.empty(num_dense, width))
        fill_normal(self.dense_vectors, INITIAL_STD, seed, "fields.dense_vectors")

    def forward(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, "B num_dense D"]:
        """Those of the dense inputs; those of sparse features come behind them."""
        return dense[..., None] * repeat(self.dense_vectors, dense.shape[0])

    def concat_sparse(
        self, of_dense: Float[Tensor, "B num_dense D"], pooled: Float[Tensor, "B sum_of_D"]
    ) -> Float[Tensor, "B M D"]:
        """The vectors of all fields."""
        return torch.cat([of_dense, pooled.unflatten(1, (self.num_sparse, self.width))], dim=1)


class DenseVector(nn.Module):
    """All dense inputs as one vector of the width of the embeddings, by an MLP with ReLU after every layer; where there
    are no dense inputs there is none."""

    def __init__(
        self, num_dense: int, hidden: Sequence[int], width: int, options: MLPOptions | None, name: str
    ) -> None:
        """`hidden` are the widths of the MLP's layers before the last, `name` is its place in the model."""
        super().__init__()
        self.num_vectors = min(num_dense, 1)
        self.width = width
        self.mlp = (
            MLP([num_dense, *hidden, width], relu_last=True, options=options, name=f"{name}.mlp") if num_dense else None
        )

    def forward(self, dense: Float[Tensor, "B num_dense"], batch: BatchSlice | None) -> Float[Tensor, "B one D"]:
        """The vector, in the type of the inputs."""
        if self.mlp is None:
            return dense.new_empty(dense.shape[0], 0, self.width)
        return cast(Tensor, self.mlp(dense, batch)).to(dense.dtype)[:, None]


class FieldMixer(nn.Module):
    """Linear combinations of fields, element by element of their vectors: y_l = sum_m W_lm x_m [+ b_l]."""

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.linear = SkipInitLinear(num_inputs, num_outputs, bias=bias)

    def forward(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B L D"]:
        return self.mix_columns(fields).transpose(1, 2)

    def mix_columns(self, fields: Float[Tensor, "B M D"]) -> Float[Tensor, "B D L"]:
        """The same with combinations as columns."""
        rows = fields.transpose(1, 2)
        return cast(Tensor, self.linear(rows.flatten(0, 1))).unflatten(0, rows.shape[:2])


class FirstOrderTerm(nn.Module):
    """A bias, a weight per dense input and a weight per id, all added up: a logistic regression inside another model.

    Weights of dense inputs and bias start at zero.
    """

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.dense = SkipInitLinear(num_dense, 1)
        with torch.no_grad():
            self.dense.weight.zero_()
            self.dense.bias.zero_()

    def forward(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, " B"]:
        """The weighted sum of dense inputs, and the bias; the weights of ids are added to it."""
        return cast(Tensor, self.dense(dense)).squeeze(1)


def common_width(model: str, dims: Mapping[str, int], min_width: int = 1) -> int:
    """The one width of all features. Raises MesetaError, naming `model`, where they differ or fall below
    `min_width`."""
    widest = max(dims, key=lambda feature: dims[feature])
    width = dims[widest]
    for feature, dim in dims.items():
        if dim != width or dim < min_width:
            other = f" and {widest!r} {width}" if dim != width else ""
            raise MesetaError(
                f"{model}: feature {feature!r} has embedding_dim {dim}{other}, but all must have one width, at least "
                f"{min_width}; give all tables embedding_dim={max(width, min_width)}"
            )
    return width


def split_weights(
    pooled: Float[Tensor, "B sum_of_D"], num_sparse: int
) -> tuple[Float[Tensor, "B num_sparse D"], Float[Tensor, "B num_sparse"]]:
    """Pooled rows of width D + 1 as (vectors, first-order weights): the weight of an id is the last column of its row.

    One row holds both, so that a plan places them together, one lookup reads them and one update writes them.
    """
    rows = pooled.unflatten(1, (num_sparse, -1))
    return rows[..., :-1], rows[..., -1]
