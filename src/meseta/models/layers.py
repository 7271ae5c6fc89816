"""What the models share: stacks of linear layers, and the widths of the pooled embeddings that they read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from meseta.jagged.shapes import Float
from meseta.spec import FeatureSpec, MesetaError, TableSpec


class BlankLinear(nn.Linear):
    """A linear layer whose weights the model sets: torch's own start would draw from the global random state."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


def mlp(widths: Sequence[int], *, relu_last: bool) -> nn.Sequential:
    """Linear layers `widths[0] -> widths[1] -> ...` with ReLU between them, and after the last one if asked for."""
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(widths):
        layers += [BlankLinear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))


def pooled_dims(model: str, embeddings: nn.Module) -> dict[str, int]:
    """Width of each pooled feature, in the order of `embeddings.features`, read from `embeddings.tables`.

    Raises MesetaError for a feature with pooling 'none': its rows per sample vary, and these models need a fixed width.
    """
    tables = cast(Sequence[TableSpec], embeddings.tables)
    features = cast(Sequence[FeatureSpec], embeddings.features)
    width = {table.name: table.embedding_dim for table in tables}
    for feature in features:
        if feature.pooling == "none":
            raise MesetaError(
                f"{model}: feature {feature.name!r} has pooling 'none', but the model needs one vector per sample; "
                "use pooling 'sum' or 'mean'"
            )
    return {feature.name: width[feature.table] for feature in features}


def check_widths(model: str, names: str, widths: Sequence[int]) -> None:
    """Raise MesetaError unless every width is at least 1."""
    for width in widths:
        if width < 1:
            raise MesetaError(f"{model}: widths in {names} must be at least 1, got {list(widths)}")


def check_inputs(
    model: str,
    dense: Float[Tensor, "B num_dense"],
    pooled: Float[Tensor, "B sum_of_D"],
    num_dense: int,
    pooled_width: int,
) -> None:
    """Raise MesetaError unless both inputs have the widths that the model was built for."""
    if dense.shape[1] != num_dense:
        raise MesetaError(
            f"{model}: {dense.shape[1]} dense inputs, but the model was built with num_dense={num_dense}; "
            f"give a tensor [B, {num_dense}]"
        )
    if pooled.shape[1] != pooled_width:
        raise MesetaError(
            f"{model}: pooled embeddings have {pooled.shape[1]} columns, but the model was built for {pooled_width}; "
            "give the pooled output of the embeddings that the model was built on"
        )
