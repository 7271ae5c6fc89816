"""Cross networks. Each layer multiplies the network's input with a linear function of the previous layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meseta.config.models.interactions import Activation, CrossKind
from meseta.models.initialization import fill_normal
from meseta.models.layers import SkipInitLinear, check_widths
from meseta.ops.mlp import mlp
from meseta.ops.sums import add_product, softmax
from meseta.sparse.shapes import Float

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}


@dataclass(frozen=True, kw_only=True)
class CrossShape:
    """Shape of a cross network of DCN-V2."""

    kind: CrossKind = "full"
    """Type of the matrices: full-rank, low-rank, or mixtures of low-rank experts."""
    num_layers: int = 3
    low_rank: int = 64
    """Rank of each matrix of kinds `low_rank` and `mixture`."""
    num_experts: int = 4
    """Number of experts per layer of kind `mixture`."""
    activation: Activation = "tanh"
    """Activation between the matrices of an expert of kind `mixture`."""

    def check(self, model: str) -> None:
        """Raise MesetaError unless all counts are at least 1. `model` is its name."""
        check_widths(model, "cross", [self.num_layers, self.low_rank, self.num_experts])


def make_cross(num_inputs: int, shape: CrossShape) -> nn.Module:
    """Create a cross network from [B, num_inputs] to [B, num_inputs]. The caller initializes its weights."""
    if shape.kind == "full":
        return FullCross(num_inputs, shape.num_layers)
    if shape.kind == "low_rank":
        return LowRankCross(num_inputs, shape.num_layers, shape.low_rank)
    return MixtureCross(num_inputs, shape)


class FullCross(nn.Module):
    """Cross layers of DCN-V2 (arXiv 2008.13535, section 3, equation 1): x_{l+1} = x_0 * (W_l x_l + b_l) + x_l."""

    def __init__(self, num_inputs: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SkipInitLinear(num_inputs, num_inputs) for _ in range(num_layers))

    def forward(self, x0: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        x = x0
        for layer in self.layers:
            x = add_product(x, x0, layer(x))
        return x


class LowRankCross(nn.Module):
    """Low-rank cross layers (arXiv 2008.13535, section 3): x_{l+1} = x_0 * (U_l (V_l x_l) + b_l) + x_l."""

    def __init__(self, num_inputs: int, num_layers: int, low_rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(SkipInitLinear(num_inputs, low_rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(SkipInitLinear(low_rank, num_inputs) for _ in range(num_layers))

    def forward(self, x0: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = add_product(x, x0, up(down(x)))
        return x


class MixtureCross(nn.Module):
    """Cross layers with mixtures of low-rank experts (arXiv 2008.13535, section 3, equations 3 and 4)."""

    def __init__(self, num_inputs: int, shape: CrossShape) -> None:
        super().__init__()
        layers, experts, rank = range(shape.num_layers), shape.num_experts, shape.low_rank
        self.rank = rank
        self.activate = ACTIVATIONS[shape.activation]
        self.gates = nn.ModuleList(SkipInitLinear(num_inputs, experts, bias=False) for _ in layers)
        self.down = nn.ModuleList(SkipInitLinear(num_inputs, experts * rank, bias=False) for _ in layers)
        self.inner = nn.ParameterList(torch.empty(experts, rank, rank) for _ in layers)
        self.up = nn.ModuleList(SkipInitLinear(experts * rank, num_inputs) for _ in layers)

    def extra_repr(self) -> str:
        return f"activation={self.activate.__name__}"

    def forward(self, x0: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        # x_{l+1} = sum_i G_i(x_l) E_i(x_l) + x_l, with G = softmax of a linear function of x_l.
        # E_i(x) = x_0 * (U_i g(C_i g(V_i x)) + b), where all experts of a layer share b.
        x = x0
        for gates, down, inner, up in zip(self.gates, self.down, self.inner, self.up, strict=True):
            # Gates sum to 1, so the concatenated matrices U of all experts can be applied to the gated activations.
            seen = self.activate(down(x)).split(self.rank, dim=1)
            inside = [self.activate(mlp(v, [c], [None], relu_last=False)) for v, c in zip(seen, inner, strict=True)]
            gated = torch.stack(inside, dim=1) * softmax(gates(x))[..., None]  # [B, experts, rank]
            x = add_product(x, x0, up(gated.flatten(1)))
        return x

    def fill_inner(self, seed: int, name: str) -> None:
        """Initialize the matrices C like those of `fill_linear`. `name` is the path of the network in its model."""
        for index, inner in enumerate(self.inner):
            fill_normal(inner, math.sqrt(1.0 / self.rank), seed, f"{name}.inner.{index}")


class GatedCross(nn.Module):
    """Gated cross layers (arXiv 2311.04635, section 3.2): c_{l+1} = c_0 * (W_l c_l + b_l) * sigmoid(V_l c_l) + c_l."""

    def __init__(self, num_inputs: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SkipInitLinear(num_inputs, num_inputs) for _ in range(num_layers))
        self.gates = nn.ModuleList(SkipInitLinear(num_inputs, num_inputs, bias=False) for _ in range(num_layers))

    def forward(self, c0: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        c = c0
        for layer, gate in zip(self.layers, self.gates, strict=True):
            c = add_product(c, c0 * layer(c), torch.sigmoid(gate(c)))
        return c
