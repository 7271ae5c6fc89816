"""DLRM: pairwise dot products of dense inputs and embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

from torch import Tensor, nn

from meseta.config.models.classic import DLRMConfig
from meseta.models.columns import BOTTOM, ColumnAxes, InputColumns, ParameterAxes, reading
from meseta.models.layers import MLP, MLPOptions, ModelBuildArgs, ScoringModel, check_widths, fill_normal
from meseta.ops.concat import concat
from meseta.ops.dot_interaction import dot_interaction
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


class DLRMBase(ScoringModel):
    """Base class with a bottom MLP for dense inputs, if there are any, and a top MLP for logits."""

    top_mlp: MLP

    def set_bottom_mlp(self, widths: Sequence[int], options: MLPOptions | None) -> None:
        """Create the bottom MLP with ReLU after each layer."""
        self.bottom_width = widths[-1]
        self.bottom_mlp = (
            MLP([self.num_dense, *widths], relu_last=True, options=options, name="bottom_mlp")
            if self.num_dense
            else None
        )

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        return dense if self.bottom_mlp is None else cast(Tensor, self.bottom_mlp(dense, self.batch_slice))

    def axes_of_interaction(self, columns: InputColumns, interaction: Mapping[str, ParameterAxes]) -> ColumnAxes:
        """Return axes of the model, given those of its `interaction` and top MLP."""
        bottom = None, reading(columns.dense_labels())
        return ColumnAxes({"bottom_mlp.0.weight": bottom, **interaction}, modules={"bottom_mlp": BOTTOM})

    def mlp_layers(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (name in the model, layer) of the linear layers of both MLPs."""
        for stack in filter(None, (self.bottom_mlp, self.top_mlp)):
            for index, layer in stack.named_children():
                if isinstance(layer, nn.Linear):
                    yield f"{stack.name}.{index}", layer


class DLRM(DLRMBase):
    """Deep learning recommendation model (arXiv 1906.00091, sections 2.1 and 2.2).

        dense [B, num_dense] -> bottom MLP -> x [B, D]
        ids                  -> embeddings -> e [B, F, D]
        interaction: concat(x, dot products of all pairs of x, e_1, ..., e_F)  [B, D + F(F+1)/2]
        top MLP              -> logits [B]

    Without dense inputs there is no bottom MLP and no x. The top MLP then reads the products of all pairs of
    embeddings, or the embedding itself if there is only one.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        interaction: Literal["dot", "none"] = "dot",
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model.

        Args:
            embeddings: See `ScoringModel`.
            num_dense: Number of dense inputs. With 0, `bottom_mlp` only states the width of the embeddings.
            bottom_mlp: Widths of the bottom MLP's layers, such as (512, 256, 64, D), with ReLU after each.
            top_mlp: Hidden widths of the top MLP, such as (512, 256).
            interaction: 'dot', or 'none' to concatenate x and the embeddings without products.
            options: Options of both MLPs. With bfloat16, pairwise products are summed in float32.
            seed: Seed of the initial weights.

        Raises MesetaError if `bottom_mlp` is empty, a width is below 1, or tables for 'dot' have another width than D.
        """
        super().__init__(embeddings, num_dense)
        check_widths("DLRM", "bottom_mlp and top_mlp", [*bottom_mlp, *top_mlp])
        if not bottom_mlp:
            raise MesetaError("DLRM: bottom_mlp is empty; add at least one layer with the width of the embeddings")
        self.interaction = interaction
        self.set_bottom_mlp(bottom_mlp, options)
        width = bottom_mlp[-1] if num_dense else 0
        if interaction == "dot":
            _check_equal_widths(self.dims, bottom_mlp[-1])
        num_pairs = math.comb(len(self.dims) + bool(num_dense), 2) if interaction == "dot" else 0
        self.has_pairs = num_pairs > 0
        num_interactions = width + (num_pairs or self.pooled_width)
        self.top_mlp = MLP([num_interactions, *top_mlp, 1], relu_last=False, options=options, name="top_mlp")
        self._set_initial_weights(seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        return self.top_mlp(self._interact(x, pooled), self.batch_slice).squeeze(1)

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        pairs = columns.pair_labels() if self.interaction == "dot" else []
        top_inputs = [*columns.bottom_labels(self.bottom_width), *(pairs or columns.sparse_labels())]
        return self.axes_of_interaction(columns, {"top_mlp.0.weight": (None, reading(top_inputs))})

    def _interact(self, x: Tensor, pooled: Tensor) -> Tensor:
        if not self.has_pairs:
            return concat(x, pooled, x.dtype)
        if self.bottom_mlp is not None:
            return dot_interaction(x, pooled)
        width = self.pooled_width // len(self.dims)
        # The operator computes pairs with its first argument too, and returns a copy of it, which is dropped.
        first, others = pooled.split([width, self.pooled_width - width], dim=1)
        return dot_interaction(first, others)[:, width:]

    def _set_initial_weights(self, seed: int) -> None:
        # As in the published code: weights from N(0, 2 / (inputs + outputs)), biases from N(0, 1 / outputs).
        for name, layer in self.mlp_layers():
            num_outputs, num_inputs = layer.weight.shape
            fill_normal(layer.weight, math.sqrt(2.0 / (num_outputs + num_inputs)), seed, f"{name}.weight")
            if layer.bias is not None:
                fill_normal(layer.bias, math.sqrt(1.0 / num_outputs), seed, f"{name}.bias")


def _check_equal_widths(dims: dict[str, int], width: int) -> None:
    for feature, dim in dims.items():
        if dim != width:
            raise MesetaError(
                f"DLRM: the dot interaction needs vectors of equal width, but feature {feature!r} has embedding_dim "
                f"{dim} and the bottom MLP has the output width {width}; make them equal, or use interaction='none'"
            )


def make_dlrm(config: DLRMConfig, request: ModelBuildArgs) -> DLRM:
    """Build DLRM from its config."""
    return request.build(
        DLRM,
        bottom_mlp=(*config.bottom_mlp, config.embedding_dim),
        top_mlp=config.top_mlp,
        interaction=config.interaction,
    )
