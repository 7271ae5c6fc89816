"""DLRM-DCNv2: DLRM with low-rank cross layers instead of dot products, the model of MLPerf Training since v3.0."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from meseta.config.models.classic import DLRMDCNv2Config
from meseta.models.columns import ColumnAxes, InputColumns, reading
from meseta.models.interactions.deep_cross import LowRankCross
from meseta.models.layers import MLP, MLPOptions, ModelBuildArgs, check_widths, fill_linear, fill_uniform
from meseta.models.ranking.dlrm import DLRMBase
from meseta.ops.concat import concat
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


class DLRMDCNv2(DLRMBase):
    """DLRM with a low-rank cross network (DCN-V2, arXiv 2008.13535), as in MLPerf Training v4.0.

        dense [B, num_dense] -> bottom MLP -> x [B, D]
        ids                  -> embeddings -> e [B, sum of D_f]
        cross layers over concat(x, e)  [B, D + sum of D_f]
        top MLP              -> logits [B]

    Without dense inputs there is no bottom MLP and no x. Initial weights are those of MLPerf's reference.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        cross: tuple[int, int] = (3, 512),
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model.

        Args:
            embeddings: See `ScoringModel`.
            num_dense: Number of dense inputs.
            bottom_mlp: Widths of the bottom MLP's layers, such as (512, 256, 128), with ReLU after each.
            top_mlp: Hidden widths of the top MLP, such as (1024, 1024, 512, 256).
            cross: (number of cross layers, rank of each layer's matrix U V).
            options: Options of the MLPs. Cross layers compute in the type of their activations.
            seed: Seed of the initial weights.

        Raises MesetaError if `bottom_mlp` is empty or a width is below 1.
        """
        super().__init__(embeddings, num_dense)
        check_widths("DLRMDCNv2", "bottom_mlp and top_mlp", [*bottom_mlp, *top_mlp])
        check_widths("DLRMDCNv2", "cross", cross)
        if not bottom_mlp:
            raise MesetaError("DLRMDCNv2: bottom_mlp is empty; add at least one layer")
        num_crossed = bottom_mlp[-1] * bool(num_dense) + self.pooled_width
        self.set_bottom_mlp(bottom_mlp, options)
        self.cross = LowRankCross(num_crossed, *cross)
        self.top_mlp = MLP([num_crossed, *top_mlp, 1], relu_last=False, options=options, name="top_mlp")
        self._set_initial_weights(seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        return self.top_mlp(self.cross(concat(x, pooled, x.dtype)), self.batch_slice).squeeze(1)

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        labels = [*columns.bottom_labels(self.bottom_width), *columns.sparse_labels()]
        top = {"top_mlp.0.weight": (None, reading(labels))}
        return self.axes_of_interaction(columns, {**self.cross.label_axes("cross", labels), **top})

    def _set_initial_weights(self, seed: int) -> None:
        # MLPs: weights and biases uniform within 1 / sqrt(inputs), the default of torch.
        for name, layer in self.mlp_layers():
            bound = 1.0 / math.sqrt(max(layer.in_features, 1))
            fill_uniform(layer.weight, bound, seed, f"{name}.weight")
            if layer.bias is not None:
                fill_uniform(layer.bias, bound, seed, f"{name}.bias")
        # Cross layers: U and V from N(0, 2 / (inputs + outputs)), biases zero.
        fill_linear(self.cross, seed, "cross")


def make_dlrm_dcnv2(config: DLRMDCNv2Config, request: ModelBuildArgs) -> DLRMDCNv2:
    """Build DLRM-DCNv2 from its config."""
    return request.build(
        DLRMDCNv2,
        bottom_mlp=(*config.bottom_mlp, config.embedding_dim),
        top_mlp=config.top_mlp,
        cross=(config.cross_layers, config.cross_low_rank),
    )
