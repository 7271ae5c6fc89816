"""Fields: dense inputs and sparse features as vectors of equal width, and their first-order weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meseta.comm import BatchSlice
from meseta.models.initialization import fill_normal
from meseta.models.layers import MLP, MLPOptions, SkipInitLinear
from meseta.ops.sums import repeat
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError

INITIAL_STD = 0.1
"""Standard deviation of the initial vectors of dense inputs, as in libFM."""


class FieldVectors(nn.Module):
    """Vectors of all fields: x_j v_j with a learned v_j for dense input j, and pooled rows for a sparse feature."""

    def __init__(self, num_dense: int, num_sparse: int, width: int, seed: int) -> None:
        super().__init__()
        self.num_sparse = num_sparse
        self.num_fields = num_dense + num_sparse
        self.width = width
        self.dense_vectors = nn.Parameter(torch.empty(num_dense, width))
        fill_normal(self.dense_vectors, INITIAL_STD, seed, "fields.dense_vectors")

    def forward(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, "B num_dense D"]:
        """Return the vectors of the dense inputs, which precede those of sparse features."""
        return dense[..., None] * repeat(self.dense_vectors, dense.shape[0])

    def concat_sparse(
        self, of_dense: Float[Tensor, "B num_dense D"], pooled: Float[Tensor, "B sum_of_D"]
    ) -> Float[Tensor, "B M D"]:
        """Concatenate the vectors of dense inputs and sparse features."""
        return torch.cat([of_dense, pooled.unflatten(1, (self.num_sparse, self.width))], dim=1)


class DenseVector(nn.Module):
    """MLP that maps all dense inputs to one vector of the width of the embeddings, with ReLU after each layer."""

    def __init__(
        self, num_dense: int, hidden: Sequence[int], width: int, options: MLPOptions | None, name: str
    ) -> None:
        """Create the MLP. `hidden` has the widths of all layers but the last. `name` is the module's path in the
        model."""
        super().__init__()
        self.num_vectors = min(num_dense, 1)  # Without dense inputs there is no vector.
        self.width = width
        self.mlp = (
            MLP([num_dense, *hidden, width], relu_last=True, options=options, name=f"{name}.mlp") if num_dense else None
        )

    def forward(self, dense: Float[Tensor, "B num_dense"], batch: BatchSlice | None) -> Float[Tensor, "B one D"]:
        """Return the vector in the type of the inputs, [B, 0, D] without dense inputs."""
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
        """Return the combinations as columns of a matrix per sample."""
        rows = fields.transpose(1, 2)
        return cast(Tensor, self.linear(rows.flatten(0, 1))).unflatten(0, rows.shape[:2])


class FirstOrderTerm(nn.Module):
    """First-order term of a model: a bias, a weight per dense input, and a weight per id."""

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.dense = SkipInitLinear(num_dense, 1)
        with torch.no_grad():
            self.dense.weight.zero_()
            self.dense.bias.zero_()

    def forward(self, dense: Float[Tensor, "B num_dense"]) -> Float[Tensor, " B"]:
        """Return the bias plus the weighted sum of the dense inputs."""
        # The caller adds the weights of ids, which are columns of its tables.
        return cast(Tensor, self.dense(dense)).squeeze(1)


def common_width(model: str, dims: Mapping[str, int], min_width: int = 1) -> int:
    """Return the width that all features have. Raises MesetaError if they differ or are below `min_width`."""
    widest = max(dims, key=lambda feature: dims[feature])
    width = dims[widest]
    for feature, dim in dims.items():
        if dim != width or dim < min_width:
            other = f" and {widest!r} {width}" if dim != width else ""
            raise MesetaError(
                f"{model}: feature {feature!r} has embedding_dim {dim}{other}, but all must have the same width, at "
                f"least {min_width}; set embedding_dim={max(width, min_width)} for all tables"
            )
    return width


def split_weights(
    pooled: Float[Tensor, "B sum_of_D"], num_sparse: int
) -> tuple[Float[Tensor, "B num_sparse D"], Float[Tensor, "B num_sparse"]]:
    """Split pooled rows of width D + 1 into (vectors, first-order weights). The weight is the last column."""
    # Vector and weight share a row, so that one lookup reads them and one update writes them.
    rows = pooled.unflatten(1, (num_sparse, -1))
    return rows[..., :-1], rows[..., -1]
