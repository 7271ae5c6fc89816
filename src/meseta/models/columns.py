"""Axes of dense parameters that are indexed by input columns or by pairs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from meseta.models.layers import pooled_dims

Source = tuple[str, str]
"""Kind and name of an input: a dense column, a sparse feature, or `BOTTOM`."""
BOTTOM: Source = ("bottom", "")
"""Vector that a bottom MLP computes from all dense columns."""


class InputLabel(NamedTuple):
    """Name of an entry of an axis."""

    sources: frozenset[Source]
    """Its inputs: two for a product, none for a hidden unit."""
    element: int = 0


@dataclass(frozen=True)
class InputColumns:
    """Input columns of a model."""

    dense: tuple[str, ...]
    sparse: tuple[tuple[str, int], ...]
    """Name and table width of each sparse feature, in order."""

    @classmethod
    def from_embeddings(cls, dense: Iterable[str], embeddings: nn.Module) -> InputColumns:
        """Return the columns of a model with `embeddings`. Raises MesetaError if a feature is not pooled."""
        return cls(tuple(dense), tuple(pooled_dims("columns", embeddings).items()))

    @property
    def sources(self) -> frozenset[Source]:
        """All inputs."""
        dense = [BOTTOM, *(("dense", name) for name in self.dense)] if self.dense else []
        return frozenset([*dense, *(("sparse", name) for name, _ in self.sparse)])

    def dense_labels(self, width: int = 1) -> list[InputLabel]:
        """Return labels of the vectors of dense columns."""
        return [label for name in self.dense for label in vector_labels(("dense", name), width)]

    def bottom_labels(self, width: int) -> list[InputLabel]:
        """Return labels of the output of a bottom MLP, none without dense columns."""
        return vector_labels(BOTTOM, width) if self.dense else []

    def sparse_labels(self, num_weights: int = 0) -> list[InputLabel]:
        """Return labels of pooled embeddings, without the last `num_weights` columns of each table."""
        return [label for name, dim in self.sparse for label in vector_labels(("sparse", name), dim - num_weights)]

    def pair_labels(self) -> list[InputLabel]:
        """Return labels of the products of `dot_interaction`."""
        vectors: list[Source] = [BOTTOM] if self.dense else []
        vectors += [("sparse", name) for name, _ in self.sparse]
        return [
            InputLabel(frozenset({vector, earlier}))
            for index, vector in enumerate(vectors)
            for earlier in vectors[:index]
        ]


def vector_labels(source: Source, width: int) -> list[InputLabel]:
    """Return labels of the elements of an input's vector."""
    sources = frozenset({source})
    return [InputLabel(sources, element) for element in range(width)]


def describe_changes(before: InputColumns, now: InputColumns) -> str:
    """Return which columns were added, dropped, reordered or resized."""
    changes = []
    each = (
        ("dense", dict.fromkeys(before.dense, 1), dict.fromkeys(now.dense, 1)),
        ("sparse", dict(before.sparse), dict(now.sparse)),
    )
    for kind, old, new in each:
        kept = [name for name in old if name in new]
        sets = {
            "added": [name for name in new if name not in old],
            "dropped": [name for name in old if name not in new],
            "reordered": kept if kept != [name for name in new if name in old] else [],
            "resized": [name for name in kept if old[name] != new[name]],
        }
        changes += [f"{kind} {', '.join(map(repr, names))} {change}" for change, names in sets.items() if names]
    return "; ".join(changes)


@dataclass(frozen=True)
class LabeledAxis:
    """Axis of a dense parameter that inputs index."""

    labels: tuple[InputLabel, ...]
    starts_at_zero: bool
    """Whether new entries start at zero, unless they are also new on an axis without `starts_at_zero`."""


def reading(labels: Sequence[InputLabel]) -> LabeledAxis:
    """Return an axis whose new entries, which read new inputs, start at zero."""
    return LabeledAxis(tuple(labels), starts_at_zero=True)


def initial(labels: Sequence[InputLabel]) -> LabeledAxis:
    """Return an axis whose new entries start as in a new model."""
    return LabeledAxis(tuple(labels), starts_at_zero=False)


ParameterAxes = tuple[LabeledAxis | None, ...]
"""Axes of a parameter, `None` for one without inputs."""


@dataclass(frozen=True)
class ColumnAxes:
    """Axes of a model that inputs index, as returned by its method `column_axes(columns)`.

    On each path from a new input to the logit a factor must be zero, so that no prediction changes. Each new weight and
    row needs a path on which no other factor is zero, so that it has a gradient.
    """

    parameters: Mapping[str, ParameterAxes]
    modules: Mapping[str, Source] = field(default_factory=dict)
    """Input that a submodule computes, by name of the submodule."""
    zero_row_columns: slice = field(default_factory=lambda: slice(0))
    """Table columns that reach the logit without a weight, so that those of new tables start at zero."""
