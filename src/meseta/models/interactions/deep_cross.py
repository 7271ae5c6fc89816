"""Base class of DCN-V2 and GDCN: a cross network and an MLP, stacked or parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.interactions import Structure
from meseta.models.base import ScoringModel
from meseta.models.layers import MLP, MLPOptions, SkipInitLinear, check_widths, fill_linear
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


class DeepCrossModel(ScoringModel):
    """Cross network and MLP over x_0 = concat(dense, e_1, ..., e_F). Tables may have different widths.

    stacked     logit = MLP(cross(x_0))                             the MLP has an output layer of width 1
    parallel    logit = w . concat(cross(x_0), MLP(x_0)) + b        all layers of the MLP are hidden
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
        """Create the model. `make_cross(num_inputs)` creates the cross network. See `DCNv2` for other arguments."""
        super().__init__(embeddings, num_dense)
        name = type(self).__name__
        check_widths(name, "deep_mlp", deep_mlp)
        if structure == "parallel" and not deep_mlp:
            raise MesetaError(
                f"{name}: deep_mlp is empty, but structure 'parallel' requires an MLP with at least one layer; add "
                "layers, or choose structure 'stacked'"
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
        # Weights from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_linear(self, seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        x0 = self.options.cast(torch.cat([x, pooled], dim=1))
        crossed = self.cross(x0)
        if self.head is None:
            return cast(Tensor, self.deep_mlp(crossed, self.batch_slice)).squeeze(1)
        # The cross network and the MLP compute in the type of `options`, the last layer in that of its weights.
        both = torch.cat([crossed, self.deep_mlp(x0, self.batch_slice)], dim=1)
        return cast(Tensor, self.head(both.to(self.head.weight.dtype))).squeeze(1)
