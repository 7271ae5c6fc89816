"""Cross networks. Each layer multiplies the network's input with a linear function of the previous layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from meseta.config.models.interactions import Activation, CrossKind, DCNv2Config, GDCNConfig, Structure
from meseta.models.columns import ColumnAxes, InputColumns, InputLabel, ParameterAxes, initial, reading
from meseta.models.layers import (
    MLP,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    fill_linear,
    fill_normal,
)
from meseta.ops.common import add_product, softmax
from meseta.ops.cross_network import cross_network
from meseta.ops.mlp import mlp
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError

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
        layers = cast(Sequence[nn.Linear], self.layers)
        return cross_network(x0, [], [layer.weight for layer in layers], [layer.bias for layer in layers])

    def label_axes(self, name: str, labels: Sequence[InputLabel]) -> dict[str, ParameterAxes]:
        """Return axes by parameter. `name` is the path of the network."""
        # Outputs of new inputs, which the next layer reads with weights of zero, start as usual.
        outputs = initial(labels)
        axes: dict[str, ParameterAxes] = {}
        for layer in range(len(self.layers)):
            axes[f"{name}.layers.{layer}.weight"] = outputs, reading(labels)
            axes[f"{name}.layers.{layer}.bias"] = (outputs,)
        return axes


class LowRankCross(nn.Module):
    """Low-rank cross layers (arXiv 2008.13535, section 3): x_{l+1} = x_0 * (U_l (V_l x_l) + b_l) + x_l."""

    def __init__(self, num_inputs: int, num_layers: int, low_rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(SkipInitLinear(num_inputs, low_rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(SkipInitLinear(low_rank, num_inputs) for _ in range(num_layers))

    def forward(self, x0: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        down, up = cast(Sequence[nn.Linear], self.down), cast(Sequence[nn.Linear], self.up)
        return cross_network(
            x0, [layer.weight for layer in down], [layer.weight for layer in up], [layer.bias for layer in up]
        )

    def label_axes(self, name: str, labels: Sequence[InputLabel]) -> dict[str, ParameterAxes]:
        """Return axes by parameter. `name` is the path of the network."""
        return _factor_axes(name, labels, len(self.down), readers=("down",))


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

    def label_axes(self, name: str, labels: Sequence[InputLabel]) -> dict[str, ParameterAxes]:
        """Return axes by parameter. `name` is the path of the network."""
        return _factor_axes(name, labels, len(self.down), readers=("gates", "down"))


def _factor_axes(
    name: str, labels: Sequence[InputLabel], num_layers: int, readers: Sequence[str]
) -> dict[str, ParameterAxes]:
    """Return axes of low-rank layers, whose matrices `readers` read their inputs."""
    axes: dict[str, ParameterAxes] = {}
    for layer in range(num_layers):
        axes |= {f"{name}.{part}.{layer}.weight": (None, reading(labels)) for part in readers}
        axes |= {f"{name}.up.{layer}.weight": (initial(labels), None), f"{name}.up.{layer}.bias": (initial(labels),)}
    return axes


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
        x0 = self.options.concat(x, pooled)
        crossed = self.cross(x0)
        if self.head is None:
            return cast(Tensor, self.deep_mlp(crossed, self.batch_slice)).squeeze(1)
        # The cross network and the MLP compute in the type of `options`, the last layer in that of its weights.
        both = torch.cat([crossed, self.deep_mlp(x0, self.batch_slice)], dim=1)
        return cast(Tensor, self.head(both.to(self.head.weight.dtype))).squeeze(1)


class DCNv2(DeepCrossModel):
    """DCN-V2 (arXiv 2008.13535, section 3): a `DeepCrossModel` whose cross network has one of the kinds of
    `CrossShape`."""

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        cross: CrossShape,
        structure: Structure = "stacked",
        deep_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model.

        Args:
            embeddings: See `ScoringModel`.
            num_dense: Number of dense inputs.
            cross: Shape of the cross network.
            structure: `stacked` runs the MLP on the output of the cross network, `parallel` runs both on the input.
            deep_mlp: Hidden widths of the MLP, such as (768, 768). A stacked MLP also has an output layer of width 1.
            options: Options of the MLP. Cross layers compute in the type of its activations.
            seed: Seed of the initial weights.

        Raises MesetaError if a width is below 1 or the MLP of structure 'parallel' has no layers.
        """
        cross.check("DCNv2")
        super().__init__(
            embeddings,
            num_dense=num_dense,
            make_cross=lambda num_inputs: make_cross(num_inputs, cross),
            structure=structure,
            deep_mlp=deep_mlp,
            options=options,
            seed=seed,
        )
        if isinstance(self.cross, MixtureCross):
            for index, inner in enumerate(self.cross.inner):  # The matrices C, like those of `fill_linear`.
                fill_normal(inner, math.sqrt(1.0 / self.cross.rank), seed, f"cross.inner.{index}")

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        labels = [*columns.dense_labels(), *columns.sparse_labels()]
        axes: dict[str, ParameterAxes] = cast(Any, self.cross).label_axes("cross", labels)
        axes["deep_mlp.0.weight"] = None, reading(labels)
        if self.head is not None:
            num_hidden = self.head.in_features - self.num_dense - self.pooled_width
            hidden = [InputLabel(frozenset(), unit) for unit in range(num_hidden)]
            axes["head.weight"] = None, reading([*labels, *hidden])
        return ColumnAxes(axes)


def make_dcnv2(config: DCNv2Config, request: ModelBuildArgs) -> DCNv2:
    """Build DCN-V2 from its config."""
    cross = CrossShape(
        kind=config.cross,
        num_layers=config.cross_layers,
        low_rank=config.cross_low_rank,
        num_experts=config.cross_experts,
        activation=config.cross_activation,
    )
    return request.build(
        DCNv2,
        cross=cross,
        structure=config.structure,
        deep_mlp=config.deep_mlp,
    )


class GDCN(DeepCrossModel):
    """Gated deep and cross network (arXiv 2311.04635, section 3): a `DeepCrossModel` with a `GatedCross`. The paper's
    GDCN-S is 'stacked', GDCN-P 'parallel'."""

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        cross_layers: int,
        structure: Structure = "parallel",
        deep_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model with the arguments of `DCNv2`, except for the cross network.

        `cross_layers` is the number of gated cross layers. In the paper, `deep_mlp` is (400, 400, 400).

        Raises MesetaError if a width is below 1 or the MLP of structure 'parallel' has no layers.
        """
        check_widths("GDCN", "cross_layers", [cross_layers])
        super().__init__(
            embeddings,
            num_dense=num_dense,
            make_cross=lambda num_inputs: GatedCross(num_inputs, cross_layers),
            structure=structure,
            deep_mlp=deep_mlp,
            options=options,
            seed=seed,
        )


def make_gdcn(config: GDCNConfig, request: ModelBuildArgs) -> GDCN:
    """Build GDCN from its config."""
    return request.build(
        GDCN,
        cross_layers=config.cross_layers,
        structure=config.structure,
        deep_mlp=config.deep_mlp,
    )
