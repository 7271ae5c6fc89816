"""FinalMLP: two MLPs over differently weighed inputs, fused by products of their outputs (arXiv 2304.00902)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from meseta.config.models.interactions import FinalMLPConfig
from meseta.jagged.shapes import Float
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.fields import INITIAL_STD
from meseta.models.initialization import fill_normal
from meseta.models.layers import MLP, MLPOptions, SkipInitLinear, check_widths, fill_linear
from meseta.ops.mlp import mlp
from meseta.ops.product import batched_product
from meseta.ops.sums import repeat
from meseta.spec import MesetaError, suggest


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """One of the two streams."""

    mlp: Sequence[int] = (400, 400, 400)
    """Widths of its layers, at least one."""
    gate_mlp: Sequence[int] = (64,)
    """Hidden widths of its gate."""
    context: Sequence[str] = ()
    """Features whose pooled rows its gate reads; none: a learned vector, the same for all samples."""


class FeatureGate(nn.Module):
    """Stream-specific feature selection, arXiv 2304.00902, section 3.2: 2 sigmoid(Gate(c)) * e, Gate an MLP.

    c are the pooled rows of features that are named, or a learned vector, which starts from N(0, 0.1 squared).
    """

    def __init__(
        self, columns: Sequence[slice], width: int, num_inputs: int, hidden: Sequence[int], options: MLPOptions
    ) -> None:
        """`columns` of the pooled rows are those of the context; none: the learned vector has `width` numbers."""
        super().__init__()
        self.columns = columns
        self.vector = None if columns else nn.Parameter(torch.empty(width))
        num_context = sum(part.stop - part.start for part in columns) or width
        self.mlp = MLP([num_context, *hidden, num_inputs], relu_last=False, options=MLPOptions(dtype=options.dtype))

    def forward(self, e: Float[Tensor, "B N"], context: Float[Tensor, "B C"] | None) -> Float[Tensor, "B N"]:
        """`e` are the inputs of the stream; no `context`: the learned vector."""
        if context is None:
            context = repeat(cast(Tensor, self.vector), 1)
        return 2.0 * torch.sigmoid(self.mlp(context)).to(e.dtype) * e


class BilinearFusion(nn.Module):
    """Stream-level fusion with heads, arXiv 2304.00902, section 3.3: b + w_1 . o_1 + w_2 . o_2 + sum_j o_1j W_j o_2j.

    o_1j and o_2j are the j-th of equal pieces of o_1 and o_2; equations 10 and 11 with one bias for all heads.
    """

    def __init__(self, widths: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.first = SkipInitLinear(widths[0], 1)
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
    """FinalMLP, arXiv 2304.00902, section 3.

        e = dense, e_1, ..., e_F side by side
        h_s = 2 sigmoid(Gate_s(c_s)) * e                                     stream s = 1, 2; without gates e itself
        o_s = MLP_s(h_s)                                                     ReLU after every layer, all hidden
        logit = b + w_1 . o_1 + w_2 . o_2 + sum_j o_1j W_j o_2j              heads j

    Matrices with n inputs and m outputs start from N(0, 2 / (m + n)), biases at zero.
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
        """Build on `embeddings`, a module with `tables` and `features`; widths of tables may differ.

        Args:
            embeddings: called with the sparse inputs, returns an object whose `pooled.values` is [B, sum of D_f].
            num_dense: number of dense inputs.
            streams: the two MLPs and their gates.
            feature_gates: whether there are gates.
            num_heads: heads of the fusion; divides the width of both streams' last layers.
            options: of the streams; gates compute in their type, the fusion in that of its weights.
            seed: key of the initial weights.

        Raises MesetaError for a width below 1, a stream without layers, heads that do not divide the last one, a
        context that is no feature, or a feature without pooling.
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
                options=self.options,
                name=f"streams.{index}",
            )
            for index, stream in enumerate(streams)
        )
        self.fusion = BilinearFusion((streams[0].mlp[-1], streams[1].mlp[-1]), num_heads)
        self._set_initial_weights(seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B"]:
        """The logits above."""
        e = self.options.cast(torch.cat([x, pooled], dim=1))
        weighed = [gate(e, self._gate_context(cast(FeatureGate, gate), pooled)) for gate in self.gates] or [e, e]
        first, second = (
            stream(h, self.batch_slice).to(self.fusion.heads.dtype)
            for stream, h in zip(self.streams, weighed, strict=True)
        )
        return cast(Tensor, self.fusion(first, second))

    def _gate_context(self, gate: FeatureGate, pooled: Tensor) -> Tensor | None:
        """What the gate reads of the pooled rows."""
        return torch.cat([pooled[:, part] for part in gate.columns], dim=1) if gate.columns else None

    def _context_columns(self, stream: StreamShape) -> list[slice]:
        """Where the pooled rows of the stream's context stand."""
        ends = dict(zip(self.dims, accumulate(self.dims.values()), strict=True))
        for feature in stream.context:
            if feature not in ends:
                raise MesetaError(f"FinalMLP: a gate's context is no feature: {feature!r}; {suggest(feature, ends)}")
        return [slice(ends[feature] - self.dims[feature], ends[feature]) for feature in stream.context]

    def _set_initial_weights(self, seed: int) -> None:
        fill_linear(self, seed)
        fill_normal(self.fusion.heads, math.sqrt(2.0 / sum(self.fusion.heads.shape[1:])), seed, "fusion.heads")
        for index, gate in enumerate(self.gates):
            vector = cast(FeatureGate, gate).vector
            if vector is not None:
                fill_normal(vector, INITIAL_STD, seed, f"gates.{index}.vector")


def _check_stream(name: str, stream: StreamShape, num_heads: int) -> None:
    check_widths("FinalMLP", f"{name}: mlp, gate_mlp and num_heads", [*stream.mlp, *stream.gate_mlp, num_heads])
    if not stream.mlp:
        raise MesetaError(f"FinalMLP: {name} has no layer; give the widths of at least one")
    if stream.mlp[-1] % num_heads:
        raise MesetaError(
            f"FinalMLP: the last layer of {name} has {stream.mlp[-1]} outputs, which {num_heads} heads do not divide; "
            "make one a multiple of the other"
        )


def make_finalmlp(config: FinalMLPConfig, request: ModelBuildArgs) -> FinalMLP:
    """The model of a config."""
    return FinalMLP(
        request.embeddings,
        num_dense=request.num_dense,
        streams=(
            StreamShape(mlp=config.first_mlp, gate_mlp=config.gate_mlp, context=config.first_context),
            StreamShape(mlp=config.second_mlp, gate_mlp=config.gate_mlp, context=config.second_context),
        ),
        feature_gates=config.feature_gates,
        num_heads=config.fusion_heads,
        options=request.options,
        seed=request.seed,
    )
