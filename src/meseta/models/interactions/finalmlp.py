"""FinalMLP: two MLPs over gated inputs, combined by products of their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.interactions import FinalMLPConfig
from meseta.models.layers import (
    INITIAL_STD,
    MLP,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    fill_linear,
    fill_normal,
)
from meseta.ops.common import repeat
from meseta.ops.mlp import mlp
from meseta.ops.product import batched_product
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError, suggest


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """Shape of one of the two streams."""

    mlp: Sequence[int] = (400, 400, 400)
    """Widths of the stream's layers, at least one."""
    gate_mlp: Sequence[int] = (64,)
    """Hidden widths of the gate."""
    context: Sequence[str] = ()
    """Features whose pooled rows the gate reads. If empty, it reads a learned vector."""
    dropout: float | None = None
    """Dropout rate of the stream's layers. `None` means that of the `MLPOptions`."""

    def layer_options(self, options: MLPOptions) -> MLPOptions:
        """Return `options` with the dropout rate of this stream. Raises MesetaError if the rate is invalid."""
        return options if self.dropout is None else replace(options, dropout=self.dropout)


class FeatureGate(nn.Module):
    """Stream-specific feature selection (arXiv 2304.00902, section 3.2): 2 sigmoid(Gate(c)) * e, where Gate is an MLP.

    The context c has the pooled rows of selected features, or is a learned vector.
    """

    def __init__(
        self, columns: Sequence[slice], width: int, num_inputs: int, hidden: Sequence[int], options: MLPOptions
    ) -> None:
        """Create the gate. `columns` selects the context. If empty, a vector of length `width` is learned."""
        super().__init__()
        self.columns = columns
        self.vector = None if columns else nn.Parameter(torch.empty(width))
        num_context = sum(part.stop - part.start for part in columns) or width
        self.mlp = MLP([num_context, *hidden, num_inputs], relu_last=False, options=MLPOptions(dtype=options.dtype))

    def forward(self, e: Float[Tensor, "B N"], context: Float[Tensor, "B C"] | None) -> Float[Tensor, "B N"]:
        """Return the gated inputs of the stream. `context` is `None` for the learned vector."""
        if context is None:
            context = repeat(cast(Tensor, self.vector), 1)
        return 2.0 * torch.sigmoid(self.mlp(context)).to(e.dtype) * e


class BilinearFusion(nn.Module):
    """Stream-level fusion b + w_1 . o_1 + w_2 . o_2 + sum_j o_1j W_j o_2j, with heads j.

    o_1j and o_2j are equal parts of o_1 and o_2 (arXiv 2304.00902, section 3.3, equations 10 and 11).
    """

    def __init__(self, widths: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.first = SkipInitLinear(widths[0], 1)  # Its bias is that of all heads.
        self.second = SkipInitLinear(widths[1], 1, bias=False)
        self.heads = nn.Parameter(torch.empty(num_heads, widths[1] // num_heads, widths[0] // num_heads))

    def forward(self, first: Float[Tensor, "B N"], second: Float[Tensor, "B K"]) -> Float[Tensor, " B"]:
        num_heads = len(self.heads)
        if num_heads == 1:
            seen = mlp(first, [self.heads[0]], [None], relu_last=False)
        else:
            pieces = first.unflatten(1, (num_heads, -1)).transpose(0, 1)
            seen = batched_product(pieces, self.heads.transpose(1, 2)).transpose(0, 1).flatten(1)
        bilinear = (seen * second).sum(dim=1)
        return cast(Tensor, self.first(first) + self.second(second)).squeeze(1) + bilinear


class FinalMLP(ScoringModel):
    """FinalMLP (arXiv 2304.00902, section 3).

    e = concat(dense, e_1, ..., e_F)
    h_s = 2 sigmoid(Gate_s(c_s)) * e                                stream s = 1, 2; without gates, h_s = e
    o_s = MLP_s(h_s)                                                ReLU after every layer, all hidden
    logit = BilinearFusion(o_1, o_2)
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        streams: tuple[StreamShape, StreamShape],
        feature_gates: bool = True,
        num_heads: int = 1,
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model.

        Args:
            embeddings: See `ScoringModel`. Tables may have different widths.
            num_dense: Number of dense inputs.
            streams: Shapes of the two streams.
            feature_gates: Whether streams have gates.
            num_heads: Number of heads of the fusion.
            options: Options of streams without a dropout rate. Gates compute in their type, the fusion in that of its
                weights.
            seed: Seed of the initial weights.

        Raises MesetaError if a width is below 1, a stream has no layers or an invalid dropout rate, the heads do not
        divide the width of a stream's last layer, or a context is not a feature.
        """
        super().__init__(embeddings, num_dense)
        self.options = options or MLPOptions()
        for number, stream in enumerate(streams, start=1):
            _check_stream(f"stream {number}", stream, num_heads)
        num_inputs = num_dense + self.pooled_width
        self.gates = nn.ModuleList(
            FeatureGate(
                self._context_columns(stream), max(self.dims.values()), num_inputs, stream.gate_mlp, self.options
            )
            for stream in (streams if feature_gates else ())
        )
        self.streams = nn.ModuleList(
            MLP(
                [num_inputs, *stream.mlp],
                relu_last=True,
                last_is_hidden=True,
                options=stream.layer_options(self.options),
                name=f"streams.{index}",
            )
            for index, stream in enumerate(streams)
        )
        self.fusion = BilinearFusion((streams[0].mlp[-1], streams[1].mlp[-1]), num_heads)
        self._set_initial_weights(seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        e = self.options.concat(x, pooled)
        weighed = [gate(e, self._gate_context(cast(FeatureGate, gate), pooled)) for gate in self.gates] or [e, e]
        first, second = (
            stream(h, self.batch_slice).to(self.fusion.heads.dtype)
            for stream, h in zip(self.streams, weighed, strict=True)
        )
        return cast(Tensor, self.fusion(first, second))

    def _gate_context(self, gate: FeatureGate, pooled: Tensor) -> Tensor | None:
        return torch.cat([pooled[:, part] for part in gate.columns], dim=1) if gate.columns else None

    def _context_columns(self, stream: StreamShape) -> list[slice]:
        ends = dict(zip(self.dims, accumulate(self.dims.values()), strict=True))
        for feature in stream.context:
            if feature not in ends:
                raise MesetaError(f"FinalMLP: context {feature!r} of a gate is not a feature; {suggest(feature, ends)}")
        return [slice(ends[feature] - self.dims[feature], ends[feature]) for feature in stream.context]

    def _set_initial_weights(self, seed: int) -> None:
        # Weights from N(0, 2 / (inputs + outputs)), biases with zeros.
        fill_linear(self, seed)
        # The authors' code (reczoo/FuxiCTR, model_zoo/FinalMLP) draws all heads as one matrix with one column.
        fill_normal(self.fusion.heads, math.sqrt(2.0 / (1 + self.fusion.heads.numel())), seed, "fusion.heads")
        for index, gate in enumerate(self.gates):
            vector = cast(FeatureGate, gate).vector
            if vector is not None:
                # The same N(0, 0.1 squared) as for the vectors of dense inputs in other models.
                fill_normal(vector, INITIAL_STD, seed, f"gates.{index}.vector")


def _check_stream(name: str, stream: StreamShape, num_heads: int) -> None:
    check_widths("FinalMLP", f"{name}: mlp, gate_mlp and num_heads", [*stream.mlp, *stream.gate_mlp, num_heads])
    if not stream.mlp:
        raise MesetaError(f"FinalMLP: {name} has no layers; set the width of at least one")
    if stream.mlp[-1] % num_heads:
        raise MesetaError(
            f"FinalMLP: the width of the last layer of {name} must be a multiple of the number of heads, got "
            f"{stream.mlp[-1]} and {num_heads}; change one of them"
        )


def make_finalmlp(config: FinalMLPConfig, request: ModelBuildArgs) -> FinalMLP:
    """Build FinalMLP from its config."""
    return request.build(
        FinalMLP,
        streams=(
            StreamShape(
                mlp=config.first_mlp,
                gate_mlp=config.gate_mlp,
                context=config.first_context,
                dropout=config.first_dropout,
            ),
            StreamShape(
                mlp=config.second_mlp,
                gate_mlp=config.gate_mlp,
                context=config.second_context,
                dropout=config.second_dropout,
            ),
        ),
        feature_gates=config.feature_gates,
        num_heads=config.fusion_heads,
    )
