"""A cross network with an MLP, one on the other or side by side: what DCN-V2 and GDCN have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.interactions import Structure
from meseta.jagged.shapes import Float
from meseta.models.base import ScoringModel
from meseta.models.layers import MLP, MLPOptions, SkipInitLinear, check_widths, fill_linear
from meseta.spec import MesetaError


class DeepCrossModel(ScoringModel):
    """A cross network and an MLP over x_0 = dense, e_1, ..., e_F side by side; widths of tables may differ.

        stacked     logit = MLP(cross(x_0))                                        the MLP ends with the logit
        parallel    logit = w . (cross(x_0), MLP(x_0) side by side) + b            all its layers are hidden

    Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases at zero.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        make_cross: Callable[[int], nn.Module],
        structure: Structure,
        deep_mlp: Sequence[int],
        options: MLPOptions | None,
        seed: int,
    ) -> None:
        """`make_cross` makes the network over so many columns; for the rest see the models."""
        super().__init__(embeddings, num_dense)
        name = type(self).__name__
        check_widths(name, "deep_mlp", deep_mlp)
        if structure == "parallel" and not deep_mlp:
            raise MesetaError(
                f"{name}: deep_mlp is empty, but in structure 'parallel' an MLP stands beside the cross network; give "
                "it layers, or take structure 'stacked'"
            )
        self.options = options or MLPOptions()
        num_inputs = num_dense + self.pooled_width
        self.cross = make_cross(num_inputs)
        widths, parallel = [num_inputs, *deep_mlp], structure == "parallel"
        self.deep_mlp = MLP(
            widths if parallel else [*widths, 1],
            relu_last=parallel,
            last_is_hidden=parallel,
            options=self.options,
            name="deep_mlp",
        )
        self.head = SkipInitLinear(num_inputs + deep_mlp[-1], 1) if parallel else None
        fill_linear(self, seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The logits above; networks compute in the type of `options`, the last layer in that of its weights."""
        x0 = self.options.cast(torch.cat([x, pooled], dim=1))
        crossed = self.cross(x0)
        if self.head is None:
            return cast(Tensor, self.deep_mlp(crossed, self.batch_slice)).squeeze(1)
        both = torch.cat([crossed, self.deep_mlp(x0, self.batch_slice)], dim=1)
        return cast(Tensor, self.head(both.to(self.head.weight.dtype))).squeeze(1)
