"""DLRM: dense inputs and embeddings meet in pairwise dot products (arXiv 1906.00091)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from meseta.config.models.classic import DLRMConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.initialization import fill_normal
from meseta.models.layers import MLP, MLPOptions, check_widths
from meseta.ops.dot_interaction import dot_interaction
from meseta.spec import MesetaError


class DLRMBase(ScoringModel):
    """What DLRM and DLRM-DCNv2 have in common: dense inputs pass a bottom MLP, which is not built where there are none,
    and a top MLP gives the logits."""

    top_mlp: MLP

    def set_bottom_mlp(self, widths: Sequence[int], options: MLPOptions | None) -> None:
        """`widths` are those of the bottom MLP's layers, ReLU after each."""
        self.bottom_mlp = (
            MLP([self.num_dense, *widths], relu_last=True, options=options, name="bottom_mlp")
            if self.num_dense
            else None
        )

    def encode_dense(self, dense: Float[Tensor, "B num_dense"]) -> Tensor:
        """What the bottom MLP makes of them."""
        return dense if self.bottom_mlp is None else cast(Tensor, self.bottom_mlp(dense, self.batch_slice))

    def mlp_layers(self) -> Iterator[tuple[str, nn.Linear]]:
        """The linear layers of both MLPs, by their names in the model."""
        for stack in filter(None, (self.bottom_mlp, self.top_mlp)):
            for index, layer in stack.named_children():
                if isinstance(layer, nn.Linear):
                    yield f"{stack.name}.{index}", layer


class DLRM(DLRMBase):
    """Deep learning recommendation model, arXiv 1906.00091, sections 2.1 and 2.2.

        dense [B, num_dense] -> bottom MLP -> x [B, D]
        ids                  -> embeddings -> e [B, F, D]
        interaction: x beside the dot products of all pairs out of (x, e_1, ..., e_F), each pair once  [B, D + F(F+1)/2]
        top MLP              -> logits [B]

    Without dense inputs there is no bottom MLP and no x: the top MLP reads the products of pairs of embeddings, or the
    only one there is.
    The weights of a layer with n inputs and m outputs start from N(0, 2 / (m + n)), its biases from N(0, 1 / m), as in
    the published code.
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
        """Build on `embeddings`, a module with `tables` and `features`; all other parameters are dense.

        Args:
            embeddings: called with the sparse inputs, returns an object whose `pooled.values` is [B, sum of D_f].
            num_dense: number of dense inputs; 0: `bottom_mlp` says how wide the embeddings are, and is not built.
            bottom_mlp: widths of the bottom MLP's layers, ReLU after each; the last is D, as in (512, 256, 64, 16).
            top_mlp: hidden widths of the top MLP, for example (512, 256); the layer with the one output is added.
            interaction: 'dot', or 'none' to concatenate x and the embeddings without any product.
            options: of both MLPs; in bfloat16, pairwise products are added in float32.
            seed: key of the initial weights.

        Raises MesetaError where 'dot' meets embeddings of different widths, or a last bottom layer of another width.
        """
        super().__init__(embeddings, num_dense)
        check_widths("DLRM", "bottom_mlp and top_mlp", [*bottom_mlp, *top_mlp])
        if not bottom_mlp:
            raise MesetaError("DLRM: bottom_mlp is empty; it needs at least one layer, as wide as the embeddings")
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
        """What the top MLP makes of x and its interactions."""
        return self.top_mlp(self._interact(x, pooled), self.batch_slice).squeeze(1)

    def _interact(self, x: Tensor, pooled: Tensor) -> Tensor:
        """What the top MLP reads."""
        if not self.has_pairs:
            return torch.cat([x, pooled.to(x.dtype)], dim=1)
        if self.bottom_mlp is not None:
            return dot_interaction(x, pooled)
        width = self.pooled_width // len(self.dims)
        first, others = pooled.split([width, self.pooled_width - width], dim=1)
        return dot_interaction(first, others)[:, width:]

    def _set_initial_weights(self, seed: int) -> None:
        for name, layer in self.mlp_layers():
            num_outputs, num_inputs = layer.weight.shape
            fill_normal(layer.weight, math.sqrt(2.0 / (num_outputs + num_inputs)), seed, f"{name}.weight")
            if layer.bias is not None:
                fill_normal(layer.bias, math.sqrt(1.0 / num_outputs), seed, f"{name}.bias")


def _check_equal_widths(dims: dict[str, int], width: int) -> None:
    for feature, dim in dims.items():
        if dim != width:
            raise MesetaError(
                f"DLRM: the dot interaction needs vectors of one width, but feature {feature!r} has embedding_dim "
                f"{dim} and the bottom MLP ends with {width}; make them equal, or use interaction='none'"
            )


def make_dlrm(config: DLRMConfig, request: ModelBuildArgs) -> DLRM:
    """The model of a config."""
    return DLRM(
        request.embeddings,
        num_dense=request.num_dense,
        bottom_mlp=(*config.bottom_mlp, config.embedding_dim),
        top_mlp=config.top_mlp,
        interaction=config.interaction,
        options=request.options,
        seed=request.seed,
    )
